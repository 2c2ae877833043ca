// What the harnesses share: a check that ends the program, and random numbers.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

#define REQUIRE(condition)                                                     \
  do {                                                                         \
    if (!(condition)) {                                                        \
      std::fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #condition); \
      std::_Exit(2);                                                           \
    }                                                                          \
  } while (false)

using Random = std::mt19937_64;

inline std::int64_t below(Random& random, std::int64_t limit) {
  return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit));
}

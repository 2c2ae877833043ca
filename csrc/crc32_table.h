// The CRC-32 of zlib by tables, for a few hundred bytes.
//
// Uses "Slicing-by-8" (Kounavis and Berry, 2005), which handles eight bytes per step, for the
// reflected polynomial 0xEDB88320.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace replaykit {

namespace detail {

using CrcTables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr CrcTables crc_tables() {
  CrcTables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t sum = byte;
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ ((sum & 1) ? 0xEDB88320u : 0u);
    tables[0][byte] = sum;
  }
  for (std::size_t table = 1; table < 8; ++table) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[table - 1][byte];
      tables[table][byte] = (before >> 8) ^ tables[0][before & 255];
    }
  }
  return tables;
}

constexpr CrcTables kCrcTables = crc_tables();

}  // namespace detail

// Continues a checksum over numbers of eight bytes, lowest byte first.
inline std::uint32_t crc32_of(const std::int64_t* numbers, std::size_t count, std::uint32_t start) {
  const detail::CrcTables& of = detail::kCrcTables;
  std::uint32_t sum = ~start;
  for (std::size_t i = 0; i < count; ++i) {
    const auto number = static_cast<std::uint64_t>(numbers[i]);
    const std::uint32_t low = static_cast<std::uint32_t>(number) ^ sum;
    const std::uint32_t high = static_cast<std::uint32_t>(number >> 32);
    sum = of[7][low & 255] ^ of[6][(low >> 8) & 255] ^ of[5][(low >> 16) & 255] ^ of[4][low >> 24] ^
          of[3][high & 255] ^ of[2][(high >> 8) & 255] ^ of[1][(high >> 16) & 255] ^ of[0][high >> 24];
  }
  return ~sum;
}

}  // namespace replaykit

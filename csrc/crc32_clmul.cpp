// This file is compiled for processors with PCLMULQDQ and SSE 4.1. It must not define anything that
// other files share.
#include <smmintrin.h>
#include <wmmintrin.h>

#include "crc32.h"

namespace {

// Powers of x modulo the polynomial, with reversed bits. The exponents are 4 * 128 + 32 and
// 4 * 128 - 32 in kFoldFour, 128 + 32 and 128 - 32 in kFoldOne, and 64 in kFoldHalf. kReduce has
// the polynomial and its inverse, for Barrett's reduction.
constexpr std::uint64_t kFoldFour[] = {0x0154442bd4, 0x01c6e41596};
constexpr std::uint64_t kFoldOne[] = {0x01751997d0, 0x00ccaa009e};
constexpr std::uint64_t kFoldHalf[] = {0x0163cd6124, 0};
constexpr std::uint64_t kReduce[] = {0x01db710641, 0x01f7011641};

__m128i load(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }

__m128i fold(__m128i sum, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(sum, by, 0x00);
  const __m128i high = _mm_clmulepi64_si128(sum, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(high, low), next);
}

}  // namespace

std::uint32_t replaykit::crc32_folded(const unsigned char* data, std::size_t bytes,
                                      std::uint32_t start) {
  __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128(static_cast<int>(~start)));
  __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
  const __m128i four = load(kFoldFour);
  for (data += 64, bytes -= 64; bytes >= 64; data += 64, bytes -= 64) {
    a = fold(a, four, load(data));
    b = fold(b, four, load(data + 16));
    c = fold(c, four, load(data + 32));
    d = fold(d, four, load(data + 48));
  }
  const __m128i one = load(kFoldOne);
  a = fold(fold(fold(a, one, b), one, c), one, d);
  for (; bytes >= 16; data += 16, bytes -= 16) a = fold(a, one, load(data));

  // Folds 128 bits to 64, then to 32, and reduces them modulo the polynomial.
  const __m128i words = _mm_setr_epi32(~0, 0, ~0, 0);
  a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, one, 0x10));
  const __m128i upper = _mm_srli_si128(a, 4);
  a = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(a, words), load(kFoldHalf), 0x00), upper);
  const __m128i reduce = load(kReduce);
  __m128i q = _mm_clmulepi64_si128(_mm_and_si128(a, words), reduce, 0x10);
  q = _mm_clmulepi64_si128(_mm_and_si128(q, words), reduce, 0x00);
  return ~static_cast<std::uint32_t>(_mm_extract_epi32(_mm_xor_si128(a, q), 1));
}

// Segment trees for processors with AVX-512. Only this file is compiled for such processors. Its
// code must not run on other processors, and no other file may share a function with it.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns about values that its own intrinsics leave undefined on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "tree_kernels.h"

namespace replaykit {
namespace {

// A node is one load of 64 bytes. The additions have the same order as in the portable kernel.
struct Wide {
  static inline __m512d load(const double* child) { return _mm512_load_pd(child); }
  static inline __m512d load(const float* child) {
    return _mm512_cvtps_pd(_mm256_load_ps(child));
  }

  // Adds halves, since the order of additions in the compiler's reduction is not specified.
  template <class Child>
  static inline double sum(const Child* child) {
    const __m512d c = load(child);
    const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(c), _mm512_extractf64x4_pd(c, 1));
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
  }

  // Finds the largest j with c_j > 0 and e_j <= x directly. The portable kernel counts instead. A
  // comment there explains why both give the same result.
  template <class Child>
  static inline std::int64_t enter(const Child* child, double& x) {
    const __m512d c = load(child);
    __m512d p = _mm512_mask_add_pd(c, 0xAA, c, _mm512_movedup_pd(c));
    p = _mm512_mask_add_pd(p, 0xCC, p, _mm512_permutex_pd(p, 0x55));
    p = _mm512_mask_add_pd(p, 0xF0, p, _mm512_permutexvar_pd(_mm512_set1_epi64(3), p));
    // Shifted by one lane: e_j = p_{j-1}, e_0 = 0.
    const __m512d zero = _mm512_setzero_pd();
    const __m512d e = _mm512_castsi512_pd(
        _mm512_alignr_epi64(_mm512_castpd_si512(p), _mm512_castpd_si512(zero), 7));
    const __mmask8 positive = _mm512_cmp_pd_mask(c, zero, _CMP_GT_OQ);
    const unsigned allowed = _mm512_mask_cmp_pd_mask(positive, e, _mm512_set1_pd(x), _CMP_LE_OQ);
    const int j = 31 - __builtin_clz(allowed | 1U);
    const __m512i lane = _mm512_castsi128_si512(_mm_cvtsi32_si128(j));
    x -= _mm512_cvtsd_f64(_mm512_permutexvar_pd(lane, e));
    return j;
  }
};

}  // namespace

const TreeKernels& avx512_kernels(TreeKind kind, bool doubles) {
  return doubles ? tables_of<Wide, double>(kind) : tables_of<Wide, float>(kind);
}

}  // namespace replaykit

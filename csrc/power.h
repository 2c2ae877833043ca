// Computes x ** y by additions, multiplications and one division, in a fixed order. The results
// have the same bits on every processor, at every position of an array, and in
// tests/native/reference.py, which takes the same steps in NumPy. Math libraries give different
// powers on different machines, and in the body and the tail of an array. A run that is resumed on
// another machine would then draw other batches.
//
// First, x = m * 2^e with m in [sqrt(1/2), sqrt(2)). The series of artanh((m - 1) / (m + 1)) gives
// log2 m. Then y * log2 x = k + r with an integer k and |r| <= 1/2. The series of exp gives 2^r.
// The product y * e is split so that it is exact. The relative error is below 1e-15 * (1 + |y|).
#pragma once

#include <cstdint>

namespace replaykit {

// Sets each x[i] to x[i] ** y. Every x[i] must be finite and >= 0, and y must be finite. 0 ** y is
// 0 for every y.
void power_all(double* x, std::int64_t n, double y);

}  // namespace replaykit

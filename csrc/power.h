// x ** y by additions, multiplications and one division, in an order that is written down: the same
// bits on every processor, in every place of an array, and in replaykit/native/fallback.py, which does
// the same steps in NumPy. Libraries' powers differ between machines, and between the body and the
// tail of an array, and with them would the batches of a run that goes on elsewhere.
//
// x = m * 2^e with m in [sqrt(1/2), sqrt(2)); log2 m by the series of artanh((m - 1) / (m + 1));
// y * log2 x = k + r with an integer k and |r| <= 1/2; 2^r by the series of exp. The product y * e is
// split so that it is exact. Relative error: below 1e-15 * (1 + |y|).
#pragma once

#include <cstdint>

namespace replaykit {

// x[i] = x[i] ** y for x[i] >= 0 and finite, y finite. 0 ** y is 0, also for y = 0 and below.
void power_all(double* x, std::int64_t n, double y);

}  // namespace replaykit

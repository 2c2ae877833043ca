// The CRC-32 of zlib by carry-less multiplication, several times faster than by tables.
//
// Uses the folding method of "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
// Instruction" (Gopal et al., 2009), for the reflected polynomial 0xEDB88320.
#pragma once

#include <cstddef>
#include <cstdint>

namespace replaykit {

// Continues a checksum. The number of bytes is a multiple of 16, and at least 64. Requires a
// processor with PCLMULQDQ and SSE 4.1.
std::uint32_t crc32_folded(const unsigned char* data, std::size_t bytes, std::uint32_t start);

}  // namespace replaykit

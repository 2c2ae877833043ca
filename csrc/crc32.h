// CRC-32 as zlib has it, by carry-less multiplication: several times faster than by tables.
//
// The folding of "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction"
// (Gopal et al., 2009), for the reflected polynomial 0xEDB88320.
#pragma once

#include <cstddef>
#include <cstdint>

namespace replaykit {

// Continues a checksum over bytes: a multiple of 16 of them, at least 64. On processors with
// PCLMULQDQ and SSE 4.1 only.
std::uint32_t crc32_folded(const unsigned char* data, std::size_t bytes, std::uint32_t start);

}  // namespace replaykit

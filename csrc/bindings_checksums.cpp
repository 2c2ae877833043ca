// Python bindings of checksums.
#include <nanobind/ndarray.h>

#include "bindings.h"
#include "crc32.h"

namespace replaykit {

void bind_checksums(nb::module_& m) {
#ifdef REPLAYKIT_CLMUL
  m.attr("has_fast_crc32") = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  m.def("crc32",
        [](nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> data,
           std::uint32_t start) {
          const std::size_t bytes = data.size();
          if (bytes < 64 || bytes % 16) {
            throw nb::value_error("expected a multiple of 16 bytes, at least 64");
          }
          nb::gil_scoped_release release;
          return crc32_folded(data.data(), bytes, start);
        },
        "Continue a CRC-32 over a multiple of 16 bytes; only if has_fast_crc32.");
#else
  m.attr("has_fast_crc32") = false;
#endif
}

}  // namespace replaykit

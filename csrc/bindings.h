// Functions that add the parts of the core to the Python module.
#pragma once

#include <nanobind/nanobind.h>

namespace replaykit {

namespace nb = nanobind;

void bind_ahead(nb::module_& m);
void bind_checksums(nb::module_& m);
void bind_commits(nb::module_& m);
void bind_episodes(nb::module_& m);
void bind_observations(nb::module_& m);
void bind_interrupts(nb::module_& m);
void bind_ledger(nb::module_& m);
void bind_marks(nb::module_& m);
void bind_matching(nb::module_& m);
void bind_moments(nb::module_& m);
void bind_reads(nb::module_& m);
void bind_relabel(nb::module_& m);
void bind_rows(nb::module_& m);
void bind_trees(nb::module_& m);

}  // namespace replaykit

// Functions that add the parts of the core to the Python module.
#pragma once

#include <nanobind/nanobind.h>

namespace replaykit {

void bind_ahead(nanobind::module_& m);
void bind_checksums(nanobind::module_& m);
void bind_commits(nanobind::module_& m);
void bind_episodes(nanobind::module_& m);
void bind_observations(nanobind::module_& m);
void bind_interrupts(nanobind::module_& m);
void bind_ledger(nanobind::module_& m);
void bind_marks(nanobind::module_& m);
void bind_matching(nanobind::module_& m);
void bind_moments(nanobind::module_& m);
void bind_reads(nanobind::module_& m);
void bind_relabel(nanobind::module_& m);
void bind_rows(nanobind::module_& m);
void bind_trees(nanobind::module_& m);

}  // namespace replaykit

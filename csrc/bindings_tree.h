// What bindings.cpp calls to name the segment trees in the module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

namespace replaykit {

void bind_trees(nanobind::module_& m);

}  // namespace replaykit

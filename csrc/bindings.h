// What each part of the core adds to the Python module.
#pragma once

#include <nanobind/nanobind.h>

void bind_rows(nanobind::module_& m);

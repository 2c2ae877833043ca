// Finds out whether the tensors of nested containers fit a schema, without headers of torch. The
// exchange interface of DLPack describes a tensor in 0.04 us. Versions of torch without it are asked
// for one attribute after the other, which takes 0.3 us.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "bindings.h"

namespace nb = nanobind;

namespace {

// The functions that a library exports for its tensors, in the layout of version 1.
struct Exchange {
  std::uint32_t major, minor;
  const Exchange* previous;
  void* managed[3];
  int (*describe)(void* tensor, nb::dlpack::dltensor* out);
};

struct Leaf {
  nb::object name, dtype, shape;
  Py_ssize_t place;
  bool has_sign, is_complex;
  nb::object example;  // a tensor of the same dtype
  nb::dlpack::dtype code{};
  std::vector<std::int64_t> sizes{};
};

struct Branch {
  int parent;  // -1 for the root
  nb::object name, size, names;
  std::vector<Leaf> leaves;
};

bool known(int result) {
  if (result < 0) throw nb::python_error();
  return result != 0;
}

nb::object known(PyObject* result) {
  if (result == nullptr) throw nb::python_error();
  return nb::steal(result);
}

bool is_a(const nb::object& value, const nb::object& type) {
  return value.is_valid() && reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())) == type.ptr();
}

bool equal(const nb::object& value, const nb::object& other) {
  return known(PyObject_RichCompareBool(value.ptr(), other.ptr(), Py_EQ));
}

bool contains(const nb::object& names, const nb::object& name) {
  return known(PySequence_Contains(names.ptr(), name.ptr()));
}

nb::object item(const nb::object& fields, const nb::object& name) {
  PyObject* const found = PyDict_GetItemWithError(fields.ptr(), name.ptr());
  if (found == nullptr && PyErr_Occurred()) throw nb::python_error();
  return nb::borrow(found);
}

nb::object get(const nb::object& value, const nb::object& name) {
  return known(PyObject_GetAttr(value.ptr(), name.ptr()));
}

nb::object call(const nb::object& value, const nb::object& name) {
  PyObject* arguments[] = {value.ptr()};
  return known(PyObject_VectorcallMethod(name.ptr(), arguments, 1, nullptr));
}

// Returns whether the only additional field is the first of the optional fields.
bool has_spare(const nb::object& fields, const nb::object& names, nb::handle optional) {
  for (const nb::handle path : optional) {
    if (nb::len(path) != 1) return false;
    const nb::object name = path[0];
    return !contains(names, name) && contains(fields, name);
  }
  return false;
}

class Template {
 public:
  Template(nb::handle types, nb::handle parts, nb::handle exchange, nb::handle branches)
      : tensor_(types[0]), container_(types[1]), size_(parts[0]), fields_(parts[1]) {
    if (!exchange.is_none()) {
      const void* found = PyCapsule_GetPointer(exchange.ptr(), "dlpack_exchange_api");
      if (found == nullptr) throw nb::python_error();
      const auto& functions = *static_cast<const Exchange*>(found);
      if (functions.major == 1) describe_ = functions.describe;
    }
    for (const nb::handle given : branches) {
      Branch branch{nb::cast<int>(given[0]), given[1], given[2], given[3], {}};
      if (branch.parent >= static_cast<int>(branches_.size())) {
        throw nb::value_error("expected each container after its parent");
      }
      for (const nb::handle each : given[4]) {
        Leaf leaf{each[0], each[1], each[2], nb::cast<Py_ssize_t>(each[3]), nb::cast<bool>(each[4]),
                  nb::cast<bool>(each[5]), each[6]};
        for (const nb::handle size : leaf.shape) leaf.sizes.push_back(nb::cast<std::int64_t>(size));
        nb::dlpack::dltensor found;
        if (describe_ != nullptr && describe_(leaf.example.ptr(), &found) == 0) {
          leaf.code = found.dtype;
        }
        PyErr_Clear();  // DLPack does not know all dtypes
        branch.leaves.push_back(std::move(leaf));
        ++count_;
      }
      branches_.push_back(std::move(branch));
    }
  }

  // Returns the leaves and their addresses, or None if the data may not fit. The function owns all
  // objects that it looks at, because other threads may change the containers meanwhile.
  nb::object match(nb::handle data, nb::handle optional) const {
    const nb::object leaves = known(PyList_New(count_)), addresses = known(PyList_New(count_));
    std::vector<nb::object> fields;
    fields.reserve(branches_.size());
    try {
      for (const Branch& branch : branches_) {
        const nb::object inner = branch.parent < 0
            ? nb::borrow(data)
            : item(fields[static_cast<std::size_t>(branch.parent)], branch.name);
        if (!is_a(inner, container_) || !equal(get(inner, size_), branch.size)) return nb::none();
        fields.push_back(get(inner, fields_));
        const auto extra = PyDict_Size(fields.back().ptr()) - PySet_Size(branch.names.ptr());
        if (extra != 0 && (extra != 1 || branch.parent >= 0 ||
                           !has_spare(fields.back(), branch.names, optional))) {
          return nb::none();
        }
        for (const Leaf& leaf : branch.leaves) {
          nb::object value = item(fields.back(), leaf.name);
          if (!is_a(value, tensor_)) return nb::none();
          nb::object address = leaf.code.bits ? described(value, leaf) : asked(value, leaf);
          if (!address.is_valid() || (leaf.has_sign && is_lazy(value, leaf))) return nb::none();
          // These take over the references.
          known(PyList_SetItem(leaves.ptr(), leaf.place, value.release().ptr()));
          known(PyList_SetItem(addresses.ptr(), leaf.place, address.release().ptr()));
        }
      }
    } catch (nb::python_error& error) {
      // Such a tensor has no strides or no address.
      if (!error.matches(PyExc_RuntimeError)) throw;
      return nb::none();
    }
    return nb::make_tuple(leaves, addresses);
  }

 private:
  // Returns the address of a contiguous tensor of the CPU with the dtype and shape of a leaf. The
  // result is invalid for any other tensor.
  nb::object described(const nb::object& value, const Leaf& leaf) const {
    nb::dlpack::dltensor found;
    if (describe_(value.ptr(), &found) != 0) {
      PyErr_Clear();
      return {};
    }
    const std::size_t dims = leaf.sizes.size();
    if (found.device.device_type != nb::device::cpu::value || found.dtype != leaf.code ||
        static_cast<std::size_t>(found.ndim) != dims) {
      return {};
    }
    std::int64_t numel = 1;
    bool strided = false;
    for (std::size_t d = dims; d-- > 0; numel *= leaf.sizes[d]) {
      if (found.shape[d] != leaf.sizes[d]) return {};
      strided |= found.strides != nullptr && leaf.sizes[d] > 1 && found.strides[d] != numel;
    }
    // Neither tensors without elements nor lazy zeros (ZeroTensor) have an address.
    if (numel != 0 && (strided || found.data == nullptr)) return {};
    return known(PyLong_FromVoidPtr(static_cast<char*>(found.data) + found.byte_offset));
  }

  // Returns the same from the attributes of the tensor.
  nb::object asked(const nb::object& value, const Leaf& leaf) const {
    if (!get(value, dtype_).is(leaf.dtype) || !equal(get(value, shape_), leaf.shape) ||
        !get(value, is_cpu_).is(Py_True) || !call(value, is_contiguous_).is(Py_True)) {
      return {};
    }
    nb::object address = call(value, data_ptr_);
    return nb::bool_(address) || !nb::bool_(call(value, numel_)) ? address : nb::object();
  }

  // Returns whether the values of a tensor are not its bytes, or have gradients.
  bool is_lazy(const nb::object& value, const Leaf& leaf) const {
    return !get(value, requires_grad_).is(Py_False) || !call(value, is_neg_).is(Py_False) ||
           (leaf.is_complex && !call(value, is_conj_).is(Py_False));
  }

  static nb::object named(const char* name) { return known(PyUnicode_InternFromString(name)); }

  nb::object tensor_, container_, size_, fields_;
  int (*describe_)(void*, nb::dlpack::dltensor*) = nullptr;
  std::vector<Branch> branches_;
  Py_ssize_t count_ = 0;
  const nb::object dtype_ = named("dtype"), shape_ = named("shape"), is_cpu_ = named("is_cpu"),
                   is_contiguous_ = named("is_contiguous"), data_ptr_ = named("data_ptr"),
                   numel_ = named("numel"), requires_grad_ = named("requires_grad"),
                   is_neg_ = named("is_neg"), is_conj_ = named("is_conj");
};

}  // namespace

void replaykit::bind_matching(nb::module_& m) {
  nb::class_<Template>(m, "Template", "The containers and tensors that rows of a schema have.")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle>(), nb::arg("types"),
           nb::arg("parts"), nb::arg("exchange").none(), nb::arg("branches"))
      .def("match", &Template::match, nb::arg("data"), nb::arg("optional"),
           "Return the leaves and their addresses, or None if the data may not fit.");
}

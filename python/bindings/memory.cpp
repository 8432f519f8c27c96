// SPDX-License-Identifier: Apache-2.0
#include "memory.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

namespace ugds::python {

namespace {

class BufferView final : public Keeper {
 public:
  explicit BufferView(const Py_buffer& view) : view_(view) {}
  ~BufferView() override { PyBuffer_Release(&view_); }
  PyObject* exporter() const { return view_.obj; }

 private:
  Py_buffer view_;
};

template <class NdArray>
class Array final : public Keeper {
 public:
  explicit Array(NdArray array) : array_(std::move(array)) {}

 private:
  NdArray array_;
};

template <class NdArray>
bool contiguous(const NdArray& array) {
  std::int64_t expected = 1;
  for (std::size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) != 1 && array.stride(i) != expected) return false;
    expected *= static_cast<std::int64_t>(array.shape(i));
  }
  return true;
}

bool take_view(nb::handle object, Memory& out) {
  if (PyObject_CheckBuffer(object.ptr()) == 0) return false;
  Py_buffer view;
  if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_ANY_CONTIGUOUS | PyBUF_WRITABLE) != 0) {
    PyErr_Clear();
    if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_ANY_CONTIGUOUS) != 0) {
      PyErr_Clear();
      raise_new(EINVAL, "register", "the buffer is not contiguous", "register a contiguous copy or its base array");
    }
  }
  out.address = view.buf;
  out.size = static_cast<std::uint64_t>(view.len);
  out.readonly = view.readonly != 0;
  out.keeper = std::make_unique<BufferView>(view);
  return true;
}

template <class NdArray>
void take_array(NdArray array, bool readonly, Memory& out) {
  if (!contiguous(array)) {
    raise_new(EINVAL, "register", "the tensor is not contiguous", "register tensor.contiguous() or its base");
  }
  out.address = const_cast<void*>(static_cast<const void*>(array.data()));
  out.size = array.nbytes();
  out.readonly = readonly;
  out.keeper = std::make_unique<Array<NdArray>>(std::move(array));
}

/// Asks for a versioned capsule, which says whether the memory is read-only. What the object raises is raised.
/// Of a GPU's memory no stream is to be waited for: nothing of it is read or written by taking it.
nb::object dlpack_capsule(nb::handle object, bool is_gpu) {
  nb::object capsule;
  try {
    capsule = is_gpu ? object.attr("__dlpack__")(nb::arg("stream") = -1, nb::arg("max_version") = nb::make_tuple(1, 0))
                     : object.attr("__dlpack__")(nb::arg("max_version") = nb::make_tuple(1, 0));
  } catch (nb::python_error& error) {
    // From before there were versions, or without a versioned form.
    if (!error.matches(PyExc_TypeError) && !error.matches(PyExc_BufferError)) throw;
  }
  if (!capsule.is_valid()) {
    capsule = is_gpu ? object.attr("__dlpack__")(nb::arg("stream") = -1) : object.attr("__dlpack__")();
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") == 0 && PyCapsule_IsValid(capsule.ptr(), "dltensor") == 0)
    throw nb::type_error("__dlpack__() did not return a DLPack capsule");
  return capsule;
}

bool take_dlpack(nb::handle object, Memory& out) {
  if (!nb::hasattr(object, "__dlpack__") || !nb::hasattr(object, "__dlpack_device__")) return false;
  int kind = 0;
  if (!nb::try_cast(nb::object(nb::object(object.attr("__dlpack_device__")())[0]), kind))
    throw nb::type_error("__dlpack_device__() did not return a device's type and number");
  // kDLCPU, kDLCUDAHost, kDLROCMHost; kDLCUDA, kDLROCM, kDLCUDAManaged.
  constexpr int kHost[] = {1, 3, 11}, kGpu[] = {2, 10, 13};
  out.is_gpu = std::ranges::find(kGpu, kind) != std::end(kGpu);
  if (!out.is_gpu && std::ranges::find(kHost, kind) == std::end(kHost)) {
    raise_new(EOPNOTSUPP, "register", "the tensor is on a device of DLPack's kind " + std::to_string(kind),
              "register memory of the host, of CUDA or of ROCm");
  }
  const nb::object capsule = dlpack_capsule(object, out.is_gpu);
  if (nb::ndarray<> array; nb::try_cast(capsule, array)) {
    take_array(std::move(array), false, out);
  } else if (nb::ndarray<nb::ro> constant; nb::try_cast(capsule, constant)) {
    take_array(std::move(constant), true, out);
  } else {
    throw nb::type_error("__dlpack__() did not return a tensor that can be used");
  }
  return true;
}

/// The array interface of GPU libraries, version 2 or 3. What its property raises (a tensor that needs a gradient) is
/// raised. False: the object has none.
bool take_cuda_array(nb::handle object, Memory& out) {
  if (!nb::hasattr(object.type(), "__cuda_array_interface__") && !nb::hasattr(object, "__cuda_array_interface__"))
    return false;
  const nb::object property = nb::getattr(object, "__cuda_array_interface__", nb::none());
  if (property.is_none()) return false;  // a tensor of the host has the property, and says so by AttributeError
  const nb::dict interface = nb::cast<nb::dict>(property);
  const nb::object data = interface["data"];
  out.address = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(data[0]));
  out.readonly = nb::cast<bool>(data[1]);
  const std::string type = nb::cast<std::string>(interface["typestr"]);
  const std::uint64_t item = std::strtoull(type.c_str() + std::min<std::size_t>(2, type.size()), nullptr, 10);
  const nb::object shape = interface["shape"];
  const nb::object strides = interface.contains("strides") ? nb::object(interface["strides"]) : nb::none();
  std::uint64_t bytes = item;
  for (std::size_t i = nb::len(shape); i-- > 0;) {
    const auto length = nb::cast<std::uint64_t>(shape[i]);
    if (!strides.is_none() && length > 1 && nb::cast<std::int64_t>(strides[i]) != static_cast<std::int64_t>(bytes))
      raise_new(EINVAL, "register", "the array is not contiguous", "register a contiguous copy or its base array");
    bytes *= length;
  }
  out.size = bytes;
  out.is_gpu = true;
  return true;
}

}  // namespace

Memory memory_of(nb::handle object) {
  Memory memory;
  if (take_cuda_array(object, memory)) return memory;
  if (!take_view(object, memory) && !take_dlpack(object, memory)) {
    throw nb::type_error(("cannot take memory from " + nb::cast<std::string>(object.type().attr("__name__")) +
                          ": give an object with the buffer protocol, DLPack or __cuda_array_interface__")
                             .c_str());
  }
  return memory;
}

PyObject* exporter_of(const Keeper* keeper) {
  const auto* view = dynamic_cast<const BufferView*>(keeper);
  return view != nullptr ? view->exporter() : nullptr;
}

}  // namespace ugds::python

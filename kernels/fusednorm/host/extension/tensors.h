// Conversion of tensors from and to Python, and detection of code that observes torch's calls.

#pragma once

#include <Python.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include "replay.h"

namespace {

// Whether something traces, transforms or observes torch's calls.
bool is_observed() {
  return c10::impl::TorchDispatchModeTLS::stack_len() != 0 || at::impl::torch_function_mode_enabled() ||
         torch::jit::tracer::isTracing() ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// Converts arguments that are tensors or None; false if another is among them, or if the first is None.
bool unpack_tensors(PyObject* const* arguments, Py_ssize_t count, Inputs& inputs) {
  inputs.clear();
  for (Py_ssize_t place = 0; place < count; ++place) {
    PyObject* argument = arguments[place];
    if (argument == Py_None) {
      inputs.emplace_back();
    } else if (THPVariable_Check(argument)) {
      inputs.push_back(THPVariable_Unpack(argument));
    } else {
      return false;
    }
  }
  return !inputs.empty() && inputs[0].defined();
}

// Returns the tensor in Python, or None if it is undefined.
PyObject* wrap_tensor(const Tensor& tensor) {
  if (!tensor.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(tensor);
}

}  // namespace

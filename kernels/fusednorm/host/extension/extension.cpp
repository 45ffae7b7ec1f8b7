// Replays known calls without Python, like `launch.replay` and `launch.recipe`, and makes the differentiable call.
//
// Python learns a call and describes it here.  The extension then recognises a call of the same kind, allocates its
// results and launches its kernels through the driver, without Python.  For a call that it does not know it returns
// None, and Python makes the call.
//
// The headers are parts of this one translation unit.  This file has the module and its Python functions.

#include <Python.h>

#include <array>
#include <mutex>
#include <shared_mutex>

#include <dlfcn.h>
#include <torch/csrc/Exceptions.h>

#include "call.h"
#include "differentiable.h"
#include "driver.h"
#include "kinds.h"
#include "learn.h"
#include "replay.h"
#include "state.h"
#include "tensors.h"

namespace {

// again(pass, policy, options, inputs, type) -> result | None
PyObject* again(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  if (is_watched()) Py_RETURN_NONE;
  uint32_t options = 0;
  if (!number_of(g_options, arguments[2], options)) {
    if (PyErr_Occurred()) PyErr_Clear();  // An option without a hash.
    Py_RETURN_NONE;
  }
  HANDLE_TH_ERRORS
  Inputs inputs;
  inputs.reserve(8);
  PyObject* given = arguments[3];
  if (!unpack(&PyTuple_GET_ITEM(given, 0), PyTuple_GET_SIZE(given), inputs)) Py_RETURN_NONE;
  const int pass = static_cast<int>(PyLong_AsLong(arguments[0]));
  const auto replay = find(pass, static_cast<uint32_t>(PyLong_AsLong(arguments[1])), options, inputs);
  std::array<Tensor, kMostResults> results;
  if (!replay || !make(*replay, inputs, results)) Py_RETURN_NONE;
  const auto fields = static_cast<Py_ssize_t>(replay->outputs.size());
  PyObject* values = PyTuple_New(fields);
  for (Py_ssize_t place = 0; place < fields; ++place) PyTuple_SET_ITEM(values, place, wrapped(results[place]));
  PyObject* packed = PyTuple_Pack(1, values);
  PyObject* result = PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(arguments[4]), packed, nullptr);
  Py_DECREF(packed);
  Py_DECREF(values);
  return result;
  END_HANDLE_TH_ERRORS
}

PyObject* define_pass(PyObject*, PyObject* arguments) {
  PyObject* given = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!", &PyTuple_Type, &given)) return nullptr;
  HANDLE_TH_ERRORS
  Pass pass;
  for (const int64_t role : integers(given))
    pass.roles.push_back(role < 2 ? static_cast<Role>(role) : Role::kParameter);
  std::unique_lock lock(g_mutex);
  g_passes.push_back(std::move(pass));
  return PyLong_FromSize_t(g_passes.size() - 1);
  END_HANDLE_TH_ERRORS
}

PyObject* forget(PyObject*, PyObject*) {
  std::unique_lock lock(g_mutex);
  g_known.clear();
  g_order.clear();
  Py_RETURN_NONE;
}

PyObject* known(PyObject*, PyObject*) {
  std::shared_lock lock(g_mutex);
  return PyLong_FromSize_t(g_known.size());
}

// set_up(backward, workspace, tensor_types, most, launch)
PyObject* set_up(PyObject*, PyObject* arguments) {
  PyObject *backward, *workspace, *types, *launched;
  unsigned most = 0;
  if (!PyArg_ParseTuple(arguments, "OOO!IO", &backward, &workspace, &PyTuple_Type, &types, &most, &launched))
    return nullptr;
  for (PyObject* each : {backward, workspace, types, launched}) Py_INCREF(each);
  g_backward = backward;
  g_workspace = workspace;
  g_tensor_types = types;
  g_most = most;
  g_launch = launched == Py_None ? nullptr : launched;
  if (g_launch == nullptr && g_launch_kernel == nullptr) {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library != nullptr) {
      g_launch_kernel = reinterpret_cast<LaunchKernel>(dlsym(library, "cuLaunchKernelEx"));
      g_is_capturing = reinterpret_cast<IsCapturing>(dlsym(library, "cuStreamIsCapturing"));
      g_retain_context = reinterpret_cast<RetainContext>(dlsym(library, "cuDevicePrimaryCtxRetain"));
      g_set_context = reinterpret_cast<SetContext>(dlsym(library, "cuCtxSetCurrent"));
    }
    if (!g_launch_kernel || !g_is_capturing || !g_retain_context || !g_set_context) {
      PyErr_SetString(PyExc_RuntimeError, "the CUDA driver is absent, or older than 12.0");
      return nullptr;
    }
  }
  Py_RETURN_NONE;
}

template <class Function>
PyCFunction as_function(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef g_methods[] = {
    {"again", as_function(again), METH_FASTCALL, nullptr},
    {"differentiable", as_function(differentiable), METH_FASTCALL, nullptr},
    {"define_pass", define_pass, METH_VARARGS, nullptr},
    {"define_differentiable", define_differentiable, METH_VARARGS, nullptr},
    {"learn", learn, METH_VARARGS, nullptr},
    {"forget", forget, METH_NOARGS, nullptr},
    {"known", known, METH_NOARGS, nullptr},
    {"set_up", set_up, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef g_module = {PyModuleDef_HEAD_INIT, "fusednorm_host", nullptr, -1, g_methods};

}  // namespace

PyMODINIT_FUNC PyInit_fusednorm_host() {
  g_options = PyDict_New();
  g_specifications = PyDict_New();
  return PyModule_Create(&g_module);
}

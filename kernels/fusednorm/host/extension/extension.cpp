// Replays recorded calls without Python, as `fusednorm.launch` does in Python, and makes the differentiable call.
//
// Python makes a call and describes it here.  The extension then recognises a call of the same kind, allocates its
// results and launches its kernels through the driver, without Python.  For a call that was not recorded it returns
// None, and Python makes the call.
//
// The headers are parts of this one translation unit.  This file has the module and its Python functions.

#include <Python.h>

#include <array>
#include <mutex>
#include <shared_mutex>

#include <dlfcn.h>
#include <torch/csrc/Exceptions.h>

#include "call_keys.h"
#include "differentiable_call.h"
#include "driver.h"
#include "record_replay.h"
#include "replay.h"
#include "replay_call.h"
#include "state.h"
#include "tensors.h"

namespace {

// replay(pass, policy, options, inputs, type) -> result | None
PyObject* replay(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  if (is_observed()) Py_RETURN_NONE;
  uint32_t options = 0;
  if (!find_number(g_option_numbers, arguments[2], options)) {
    if (PyErr_Occurred()) PyErr_Clear();  // An option without a hash.
    Py_RETURN_NONE;
  }
  HANDLE_TH_ERRORS
  Inputs inputs;
  inputs.reserve(8);
  PyObject* given = arguments[3];
  if (!unpack_tensors(&PyTuple_GET_ITEM(given, 0), PyTuple_GET_SIZE(given), inputs)) Py_RETURN_NONE;
  const int pass = static_cast<int>(PyLong_AsLong(arguments[0]));
  const auto recorded = find_replay(pass, static_cast<uint32_t>(PyLong_AsLong(arguments[1])), options, inputs);
  std::array<Tensor, kMaxResults> results;
  if (!recorded || !replay_call(*recorded, inputs, results)) Py_RETURN_NONE;
  const auto fields = static_cast<Py_ssize_t>(recorded->outputs.size());
  PyObject* values = PyTuple_New(fields);
  for (Py_ssize_t place = 0; place < fields; ++place) PyTuple_SET_ITEM(values, place, wrap_tensor(results[place]));
  PyObject* packed = PyTuple_Pack(1, values);
  PyObject* result = PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(arguments[4]), packed, nullptr);
  Py_DECREF(packed);
  Py_DECREF(values);
  return result;
  END_HANDLE_TH_ERRORS
}

// define_pass(roles) -> pass
PyObject* define_pass(PyObject*, PyObject* arguments) {
  PyObject* given = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!", &PyTuple_Type, &given)) return nullptr;
  HANDLE_TH_ERRORS
  PassInputs inputs;
  for (const int64_t role : parse_integers(given))
    inputs.roles.push_back(role < 2 ? static_cast<ShapeRole>(role) : ShapeRole::kParameter);
  std::unique_lock lock(g_mutex);
  g_passes.push_back(std::move(inputs));
  return PyLong_FromSize_t(g_passes.size() - 1);
  END_HANDLE_TH_ERRORS
}

// clear_replays()
PyObject* clear_replays(PyObject*, PyObject*) {
  std::unique_lock lock(g_mutex);
  g_replays.clear();
  g_replay_keys.clear();
  Py_RETURN_NONE;
}

// count_replays() -> count
PyObject* count_replays(PyObject*, PyObject*) {
  std::shared_lock lock(g_mutex);
  return PyLong_FromSize_t(g_replays.size());
}

// configure(run_backward, get_workspace, tensor_types, max_replays, launch)
PyObject* configure(PyObject*, PyObject* arguments) {
  PyObject *run_backward, *get_workspace, *tensor_types, *launch;
  unsigned max_replays = 0;
  if (!PyArg_ParseTuple(arguments, "OOO!IO", &run_backward, &get_workspace, &PyTuple_Type, &tensor_types, &max_replays,
                        &launch))
    return nullptr;
  for (PyObject* each : {run_backward, get_workspace, tensor_types, launch}) Py_INCREF(each);
  g_run_backward = run_backward;
  g_get_workspace = get_workspace;
  g_tensor_types = tensor_types;
  g_max_replays = max_replays;
  g_test_launch = launch == Py_None ? nullptr : launch;
  if (g_test_launch == nullptr && g_launch_kernel == nullptr) {
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

// Casts a function that takes its arguments as an array to the type in the table of methods.
template <class Function>
PyCFunction cast_function(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef g_methods[] = {
    {"replay", cast_function(replay), METH_FASTCALL, nullptr},
    {"run_differentiable", cast_function(run_differentiable), METH_FASTCALL, nullptr},
    {"define_pass", define_pass, METH_VARARGS, nullptr},
    {"define_differentiable", define_differentiable, METH_VARARGS, nullptr},
    {"record_replay", record_replay, METH_VARARGS, nullptr},
    {"clear_replays", clear_replays, METH_NOARGS, nullptr},
    {"count_replays", count_replays, METH_NOARGS, nullptr},
    {"configure", configure, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef g_module = {PyModuleDef_HEAD_INIT, "fusednorm_host", nullptr, -1, g_methods};

}  // namespace

PyMODINIT_FUNC PyInit_fusednorm_host() {
  g_option_numbers = PyDict_New();
  g_differentiable_numbers = PyDict_New();
  return PyModule_Create(&g_module);
}

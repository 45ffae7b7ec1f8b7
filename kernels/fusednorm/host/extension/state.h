// The state of the process: passes, calls by their kinds, numbered options, and objects set by Python.

#pragma once

#include <Python.h>

#include <deque>
#include <memory>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "replay.h"

namespace {

constexpr Py_ssize_t kMostOptions = 1 << 16;

std::shared_mutex g_mutex;
std::vector<Pass> g_passes;
std::unordered_map<std::string, std::shared_ptr<Replay>> g_known;  // Null if each number of rows is a kind.
std::deque<std::string> g_order;
size_t g_most = 4096;

// Everything below is accessed only while the interpreter's lock is held.
PyObject* g_options = nullptr;         // The number of each tuple of options.
PyObject* g_specifications = nullptr;  // The number of each differentiable call, by its settings.
std::deque<Differentiable> g_differentiable;
PyObject* g_backward = nullptr;   // The backward pass in Python.
PyObject* g_workspace = nullptr;  // Returns a workspace, in Python.
PyObject* g_launch = nullptr;     // Takes launches in place of the driver, in tests.
PyObject* g_tensor_types = nullptr;

bool number_of(PyObject* numbers, PyObject* what, uint32_t& number) {
  PyObject* found = PyDict_GetItemWithError(numbers, what);
  if (found == nullptr) return false;
  number = static_cast<uint32_t>(PyLong_AsUnsignedLong(found));
  return true;
}

// False without an error if there are too many already: Python handles callers with ever new options.
bool numbered(PyObject* numbers, PyObject* what, uint32_t& number) {
  if (number_of(numbers, what, number)) return true;
  if (PyErr_Occurred() || PyDict_Size(numbers) >= kMostOptions) return false;
  number = static_cast<uint32_t>(PyDict_Size(numbers));
  PyObject* value = PyLong_FromUnsignedLong(number);
  const bool kept = PyDict_SetItem(numbers, what, value) == 0;
  Py_DECREF(value);
  return kept;
}

}  // namespace

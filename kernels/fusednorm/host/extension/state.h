// What the process knows: passes, calls by their kinds, options by their numbers, and what Python has told.

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
std::unordered_map<std::string, std::shared_ptr<Replay>> g_known;  // Null where each number of rows is a kind.
std::deque<std::string> g_order;
size_t g_most = 4096;

// All that follows is touched with the interpreter's lock held.
PyObject* g_options = nullptr;         // Options, by what they are, numbered.
PyObject* g_specifications = nullptr;  // Differentiable calls, by their settings, numbered.
std::deque<Differentiable> g_differentiable;
PyObject* g_backward = nullptr;   // Python's way of a backward pass.
PyObject* g_workspace = nullptr;  // Python's workspaces.
PyObject* g_launch = nullptr;     // Takes launches in place of the driver, in tests.
PyObject* g_tensor_types = nullptr;

bool number_of(PyObject* numbers, PyObject* what, uint32_t& number) {
  PyObject* found = PyDict_GetItemWithError(numbers, what);
  if (found == nullptr) return false;
  number = static_cast<uint32_t>(PyLong_AsUnsignedLong(found));
  return true;
}

// False with no error where there are too many already: whoever draws options at random is left to Python.
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

// The state of the process: passes, replays by their keys, numbered options, and objects set by Python.

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

constexpr Py_ssize_t kMaxOptions = 1 << 16;

// Of passes and replays.
std::shared_mutex g_mutex;
std::vector<PassInputs> g_passes;
// Null if calls that differ in the number of rows have separate replays.
std::unordered_map<std::string, std::shared_ptr<CallReplay>> g_replays;
std::deque<std::string> g_replay_keys;  // The oldest first.
size_t g_max_replays = 4096;

// Everything below is accessed only while the interpreter's lock is held.
PyObject* g_option_numbers = nullptr;          // The number of each tuple of options.
PyObject* g_differentiable_numbers = nullptr;  // The number of each differentiable call, by its settings.
std::deque<DifferentiableCall> g_differentiable_calls;  // By their numbers.
PyObject* g_run_backward = nullptr;   // The backward pass in Python.
PyObject* g_get_workspace = nullptr;  // Returns a workspace, in Python.
PyObject* g_test_launch = nullptr;    // Takes launches in place of the driver, in tests.
PyObject* g_tensor_types = nullptr;   // The types whose calls nothing overrides.

// Finds the number of a key; false if it has none, or with an error if it cannot be hashed.
bool find_number(PyObject* numbers, PyObject* key, uint32_t& number) {
  PyObject* found = PyDict_GetItemWithError(numbers, key);
  if (found == nullptr) return false;
  number = static_cast<uint32_t>(PyLong_AsUnsignedLong(found));
  return true;
}

// Finds the number of a key, or assigns the next one.  False without an error if there are too many already: Python
// handles callers with ever new options.
bool find_or_assign_number(PyObject* numbers, PyObject* key, uint32_t& number) {
  if (find_number(numbers, key, number)) return true;
  if (PyErr_Occurred() || PyDict_Size(numbers) >= kMaxOptions) return false;
  number = static_cast<uint32_t>(PyDict_Size(numbers));
  PyObject* value = PyLong_FromUnsignedLong(number);
  const bool kept = PyDict_SetItem(numbers, key, value) == 0;
  Py_DECREF(value);
  return kept;
}

}  // namespace

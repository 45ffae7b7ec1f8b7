// The CUDA driver: streams of a device, and the launch of a kernel on a stream.

#pragma once

#include <Python.h>

#include <vector>

#include <cuda.h>
#include <torch/csrc/Exceptions.h>
#ifdef WITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include "replay.h"
#include "state.h"

namespace {

using LaunchKernel = CUresult (*)(const CUlaunchConfig*, CUfunction, void**, void**);
using IsCapturing = CUresult (*)(CUstream, CUstreamCaptureStatus*);
using RetainContext = CUresult (*)(CUcontext*, CUdevice);
using SetContext = CUresult (*)(CUcontext);
LaunchKernel g_launch_kernel = nullptr;
IsCapturing g_is_capturing = nullptr;
RetainContext g_retain_context = nullptr;
SetContext g_set_context = nullptr;

// Sets torch's context of a device for the thread, which has none before its first call of the CUDA runtime.
CUresult enter_context(int device) {
  CUcontext context = nullptr;
  const CUresult result = g_retain_context(&context, device);
  return result == CUDA_SUCCESS ? g_set_context(context) : result;
}

// torch's current stream of a device; null if the device is none.
void* get_current_stream(int device) {
#ifdef WITH_CUDA
  if (device >= 0) return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
#endif
  return nullptr;
}

// Whether the device is the current one, or none.
bool is_current_device(int device) {
#ifdef WITH_CUDA
  return device < 0 || c10::cuda::current_device() == device;
#else
  return device < 0;
#endif
}

// Whether a graph is captured on the stream.
bool is_capturing(int device, void* stream) {
  if (device < 0 || g_is_capturing == nullptr) return false;
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  g_is_capturing(static_cast<CUstream>(stream), &status);
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

// Passes a launch to Python; only for tests.
void launch_through_python(const PreparedLaunch& launch, unsigned x, const std::vector<uint64_t>& values) {
  pybind11::gil_scoped_acquire lock;
  PyObject* list = PyList_New(0);
  for (uint64_t value : values) {
    PyObject* number = PyLong_FromUnsignedLongLong(value);
    PyList_Append(list, number);
    Py_DECREF(number);
  }
  PyObject* done = PyObject_CallFunction(
      g_test_launch, "K(III)IIiiN", reinterpret_cast<unsigned long long>(launch.function), x, launch.grid[1],
      launch.grid[2], launch.thread_count, launch.shared_bytes, int(launch.may_start_early),
      int(launch.is_cooperative), list);
  if (done == nullptr) throw python_error();
  Py_DECREF(done);
}

// Launches a kernel on a stream with parameters from the slots, or passes the launch to Python.
void launch_kernel(const PreparedLaunch& launch, int device, void* stream, const Slots& slots) {
  thread_local std::vector<uint64_t> values;
  thread_local std::vector<void*> pointers;
  values.clear();
  for (const KernelParameter& parameter : launch.parameters)
    values.push_back(parameter.is_constant ? parameter.constant_bits : slots[parameter.slot]);
  const unsigned x = launch.grid_slot < 0 ? launch.grid[0] : static_cast<unsigned>(slots[launch.grid_slot]);
  if (g_test_launch != nullptr) {
    launch_through_python(launch, x, values);
    return;
  }
  // After its own parameters every Triton kernel has two addresses of scratch memory, which no kernel here uses.
  values.push_back(0);
  values.push_back(0);
  pointers.clear();
  for (uint64_t& value : values) pointers.push_back(&value);
  CUlaunchAttribute attributes[2];
  CUlaunchConfig config{};
  config.gridDimX = x;
  config.gridDimY = launch.grid[1];
  config.gridDimZ = launch.grid[2];
  config.blockDimX = launch.thread_count;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = launch.shared_bytes;
  config.hStream = static_cast<CUstream>(stream);
  config.attrs = attributes;
  if (launch.may_start_early) {
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[config.numAttrs++].value.programmaticStreamSerializationAllowed = 1;
  }
  if (launch.is_cooperative) {
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[config.numAttrs++].value.cooperative = 1;
  }
  CUresult result = g_launch_kernel(&config, launch.function, pointers.data(), nullptr);
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    result = enter_context(device);
    if (result == CUDA_SUCCESS) result = g_launch_kernel(&config, launch.function, pointers.data(), nullptr);
  }
  TORCH_CHECK(result == CUDA_SUCCESS, "cuLaunchKernelEx failed with error ", int(result));
}

}  // namespace

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

void* current_stream(int device) {
#ifdef WITH_CUDA
  if (device >= 0) return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
#endif
  return nullptr;
}

bool is_current(int device) {
#ifdef WITH_CUDA
  return device < 0 || c10::cuda::current_device() == device;
#else
  return device < 0;
#endif
}

bool is_captured(int device, void* stream) {
  if (device < 0 || g_is_capturing == nullptr) return false;
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  g_is_capturing(static_cast<CUstream>(stream), &status);
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

// Passes a launch to Python; only for tests.
void launch_through_python(const Start& start, unsigned x, const std::vector<uint64_t>& values) {
  pybind11::gil_scoped_acquire lock;
  PyObject* list = PyList_New(0);
  for (uint64_t value : values) {
    PyObject* number = PyLong_FromUnsignedLongLong(value);
    PyList_Append(list, number);
    Py_DECREF(number);
  }
  PyObject* done = PyObject_CallFunction(
      g_launch, "K(III)IIiiN", reinterpret_cast<unsigned long long>(start.function), x, start.grid[1], start.grid[2],
      start.threads, start.shared, int(start.early), int(start.cooperative), list);
  if (done == nullptr) throw python_error();
  Py_DECREF(done);
}

void launch(const Start& start, int device, void* stream, const Slots& slots) {
  thread_local std::vector<uint64_t> values;
  thread_local std::vector<void*> pointers;
  values.clear();
  for (const Parameter& parameter : start.parameters)
    values.push_back(parameter.constant ? parameter.bits : slots[parameter.slot]);
  const unsigned x = start.programs < 0 ? start.grid[0] : static_cast<unsigned>(slots[start.programs]);
  if (g_launch != nullptr) {
    launch_through_python(start, x, values);
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
  config.gridDimY = start.grid[1];
  config.gridDimZ = start.grid[2];
  config.blockDimX = start.threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = start.shared;
  config.hStream = static_cast<CUstream>(stream);
  config.attrs = attributes;
  if (start.early) {
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[config.numAttrs++].value.programmaticStreamSerializationAllowed = 1;
  }
  if (start.cooperative) {
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[config.numAttrs++].value.cooperative = 1;
  }
  CUresult result = g_launch_kernel(&config, start.function, pointers.data(), nullptr);
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    result = enter_context(device);
    if (result == CUDA_SUCCESS) result = g_launch_kernel(&config, start.function, pointers.data(), nullptr);
  }
  TORCH_CHECK(result == CUDA_SUCCESS, "cuLaunchKernelEx failed with error ", int(result));
}

}  // namespace

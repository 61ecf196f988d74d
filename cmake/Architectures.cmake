# The CUDA architectures that drot is built for if TORCH_CUDA_ARCH_LIST names none.

# Sets `result` to those of 8.0, 9.0, 10.0 and 12.0 that `nvcc` knows. Machine code runs on GPUs of the same
# major number and the same or a later minor number, so these are all NVIDIA GPUs since 2020 except 11.0. The
# last architecture is also built as PTX, which later GPUs compile when a program starts.
function(drot_default_architectures nvcc result)
  execute_process(COMMAND "${nvcc}" --list-gpu-arch OUTPUT_VARIABLE _known)
  set(_archs "")
  foreach(_arch 8.0 9.0 10.0 12.0)
    string(REPLACE "." "" _number "${_arch}")
    if("${_known}" MATCHES "compute_${_number}(\n|$)")
      list(APPEND _archs "${_arch}")
    endif()
  endforeach()
  if(NOT _archs)
    message(FATAL_ERROR "${nvcc} --list-gpu-arch names none of compute_80, 90, 100 and 120: set TORCH_CUDA_ARCH_LIST")
  endif()
  list(POP_BACK _archs _last)
  list(APPEND _archs "${_last}+PTX")
  set(${result} "${_archs}" PARENT_SCOPE)
endfunction()

# Targets torch::cpu and, if torch has CUDA, torch::cuda, from the torch that ${Python_EXECUTABLE} imports.
# Sets TORCH_VERSION, TORCH_CUDA_VERSION (empty for a CPU build of torch) and TORCH_SITE_PACKAGES.
#
# find_package(Torch) is not used: with a CUDA build of torch it fails unless the CUDA toolkit is complete,
# and a CPU build of drot needs no toolkit.

execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/ask_torch.py"
  OUTPUT_VARIABLE _torch_answer
  ERROR_VARIABLE _torch_error
  OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE _torch_status)
if(NOT _torch_status EQUAL 0)
  message(FATAL_ERROR "torch cannot be imported by ${Python_EXECUTABLE}:\n${_torch_error}")
endif()
string(REPLACE "\n" ";" _torch_answer "${_torch_answer}")
foreach(_line IN LISTS _torch_answer)
  string(REGEX MATCH "^([A-Z_0-9]+)=(.*)$" _ "${_line}")
  set(${CMAKE_MATCH_1} "${CMAKE_MATCH_2}")
endforeach()

add_library(torch::cpu INTERFACE IMPORTED)
target_include_directories(torch::cpu SYSTEM INTERFACE
  "${TORCH_ROOT}/include" "${TORCH_ROOT}/include/torch/csrc/api/include")
target_compile_definitions(torch::cpu INTERFACE _GLIBCXX_USE_CXX11_ABI=${TORCH_CXX11_ABI})
# at::parallel_for is a template with an OpenMP pragma, hence -fopenmp; it must use the libgomp that torch
# loads. Libraries are REQUIRED, so that the build and not the import fails if one is missing.
target_compile_options(torch::cpu INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
foreach(_name c10 torch_cpu)
  find_library(_torch_${_name} ${_name} PATHS "${TORCH_ROOT}/lib" NO_DEFAULT_PATH NO_CACHE REQUIRED)
  target_link_libraries(torch::cpu INTERFACE "${_torch_${_name}}")
endforeach()
find_library(_torch_gomp NAMES gomp libgomp.so.1 PATHS "${TORCH_ROOT}/lib" NO_DEFAULT_PATH NO_CACHE)
if(_torch_gomp)
  target_link_libraries(torch::cpu INTERFACE "${_torch_gomp}")
else()
  target_link_options(torch::cpu INTERFACE -fopenmp)
endif()

if(TORCH_CUDA_VERSION)
  add_library(torch::cuda INTERFACE IMPORTED)
  target_link_libraries(torch::cuda INTERFACE torch::cpu)
  foreach(_name c10_cuda torch_cuda)
    find_library(_torch_${_name} ${_name} PATHS "${TORCH_ROOT}/lib" NO_DEFAULT_PATH NO_CACHE REQUIRED)
    target_link_libraries(torch::cuda INTERFACE "${_torch_${_name}}")
  endforeach()
endif()

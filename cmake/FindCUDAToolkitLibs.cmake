# Finds the CUDA libraries in the nvidia-* wheels beside torch or in the CUDA toolkit. The wheels contain
# headers and versioned libraries, but neither nvcc nor plain lib*.so. The wheels are searched first: torch
# loads its libraries from them, and one process must not load two versions of a library.
#
# Targets: drot::cublas, drot::cusolver, drot::cusparse and drot::cuda_headers.

string(REGEX MATCH "^[0-9]+" _cuda_major "${TORCH_CUDA_VERSION}")
# the wheels of CUDA 13 share the folder nvidia/cu13; those of CUDA 12 have a folder each
file(GLOB _cuda_wheels "${TORCH_SITE_PACKAGES}/nvidia/cu${_cuda_major}"
  "${TORCH_SITE_PACKAGES}/nvidia/cublas" "${TORCH_SITE_PACKAGES}/nvidia/cusolver"
  "${TORCH_SITE_PACKAGES}/nvidia/cusparse")
get_filename_component(_cuda_toolkit "${CMAKE_CUDA_COMPILER}" DIRECTORY)
get_filename_component(_cuda_toolkit "${_cuda_toolkit}" DIRECTORY)
set(DROT_CUDA_ROOTS ${_cuda_wheels} "${_cuda_toolkit}")

add_library(drot::cuda_headers INTERFACE IMPORTED)
set(_cuda_missing "")
foreach(_pair "cublas:cublas_v2.h" "cusolver:cusolverDn.h" "cusparse:cusparse.h")
  string(REPLACE ":" ";" _pair "${_pair}")
  list(GET _pair 0 _name)
  list(GET _pair 1 _header)
  find_path(_cuda_${_name}_include ${_header}
    PATHS ${DROT_CUDA_ROOTS} PATH_SUFFIXES include NO_DEFAULT_PATH NO_CACHE)
  set(_cuda_${_name}_library "")
  foreach(_root IN LISTS DROT_CUDA_ROOTS)
    file(GLOB _found "${_root}/lib/lib${_name}.so*" "${_root}/lib64/lib${_name}.so*")
    if(_found AND NOT _cuda_${_name}_library)
      list(GET _found 0 _cuda_${_name}_library)
    endif()
  endforeach()
  if(_cuda_${_name}_include AND _cuda_${_name}_library)
    add_library(drot::${_name} UNKNOWN IMPORTED)
    set_target_properties(drot::${_name} PROPERTIES IMPORTED_LOCATION "${_cuda_${_name}_library}")
    target_include_directories(drot::cuda_headers SYSTEM INTERFACE "${_cuda_${_name}_include}")
  else()
    list(APPEND _cuda_missing "${_name}")
  endif()
endforeach()

if(_cuda_missing)
  list(JOIN _cuda_missing ", " _cuda_missing)
  set(CUDAToolkitLibs_NOT_FOUND_MESSAGE
    "no headers and libraries of ${_cuda_missing} beside torch or in ${_cuda_toolkit}")
else()
  set(CUDAToolkitLibs_FOUND TRUE)
endif()

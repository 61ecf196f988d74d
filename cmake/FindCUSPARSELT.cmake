# Finds cuSPARSELt, an optional library for 2:4 products, in CUSPARSELT_ROOT or in the wheel beside torch. The
# CUDA toolkit does not contain it.
#
# Target: drot::cusparselt. Sets CUSPARSELT_FOUND and CUSPARSELT_VERSION.

find_path(CUSPARSELT_INCLUDE_DIR cusparseLt.h
  PATHS "$ENV{CUSPARSELT_ROOT}" "${TORCH_SITE_PACKAGES}/nvidia/cusparselt" ${DROT_CUDA_ROOTS}
  PATH_SUFFIXES include NO_DEFAULT_PATH NO_CACHE)
set(CUSPARSELT_LIBRARY "")
if(CUSPARSELT_INCLUDE_DIR)
  get_filename_component(_cusparselt_root "${CUSPARSELT_INCLUDE_DIR}" DIRECTORY)
  file(GLOB _cusparselt_found "${_cusparselt_root}/lib/libcusparseLt.so*"
    "${_cusparselt_root}/lib64/libcusparseLt.so*")
  if(_cusparselt_found)
    list(GET _cusparselt_found 0 CUSPARSELT_LIBRARY)
  endif()
endif()

if(CUSPARSELT_LIBRARY)
  set(CUSPARSELT_VERSION "")
  file(STRINGS "${CUSPARSELT_INCLUDE_DIR}/cusparseLt.h" _cusparselt_lines
    REGEX "#define CUSPARSELT_VER_(MAJOR|MINOR|PATCH) ")
  foreach(_line IN LISTS _cusparselt_lines)
    string(REGEX MATCH "[0-9]+$" _part "${_line}")
    list(APPEND CUSPARSELT_VERSION "${_part}")
  endforeach()
  list(JOIN CUSPARSELT_VERSION "." CUSPARSELT_VERSION)
  add_library(drot::cusparselt UNKNOWN IMPORTED)
  set_target_properties(drot::cusparselt PROPERTIES
    IMPORTED_LOCATION "${CUSPARSELT_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${CUSPARSELT_INCLUDE_DIR}")
  set(CUSPARSELT_FOUND TRUE)
endif()

# The CPU kernels as OBJECT libraries: nms_cpu_kernels (which set runs) and ${NMS_CPU_OBJECTS}. Used by the module and by
# the sanitizer tests. The sources under cpu/kernels are compiled once per instruction set, each time into another
# namespace, and chosen when a call runs (isa.cc); nothing else is compiled with more than the baseline's flags.
get_filename_component(nms_root "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
set(nms_kernel_sources spmm.cc spmm_t.cc sddmm.cc few_tokens.cc column_lanes.cc)
list(TRANSFORM nms_kernel_sources PREPEND "${CMAKE_CURRENT_LIST_DIR}/kernels/")

add_library(nms_cpu_kernels OBJECT "${CMAKE_CURRENT_LIST_DIR}/isa.cc")
target_include_directories(nms_cpu_kernels PRIVATE "${nms_root}")
set(NMS_CPU_OBJECTS)

# nms_cpu_isa(name flag...): the kernels for one instruction set, in namespace nmsparse::name.
macro(nms_cpu_isa name)
  add_library(nms_cpu_${name} OBJECT ${nms_kernel_sources})
  target_include_directories(nms_cpu_${name} PRIVATE "${nms_root}")
  target_compile_definitions(nms_cpu_${name} PRIVATE NMS_ISA=${name})
  # Without contraction `a * b + c` would not become a fused multiply-add under -std=c++17. GCC warns of the undefined
  # operands inside its own AVX-512 intrinsics.
  target_compile_options(nms_cpu_${name} PRIVATE $<$<CONFIG:Release>:-O3> -ffp-contract=fast -fno-math-errno -Wall
                                                 -Wextra -Wno-psabi -Wno-maybe-uninitialized ${ARGN})
  target_compile_definitions(nms_cpu_kernels PRIVATE NMS_HAVE_${name}=1)
  list(APPEND NMS_CPU_OBJECTS nms_cpu_${name})
endmacro()

nms_cpu_isa(baseline)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  nms_cpu_isa(avx2 -mavx2 -mfma -mf16c -mbmi -mbmi2 -mpopcnt)
  nms_cpu_isa(avx512 -mavx2 -mfma -mf16c -mbmi -mbmi2 -mpopcnt -mavx512f -mavx512cd -mavx512bw -mavx512dq -mavx512vl
              -mavx512vbmi -mavx512vbmi2 -mprefer-vector-width=512)
endif()

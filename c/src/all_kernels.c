/* The table of everything: for hosts. It ties all kernels to the program, so firmware has a table of its own. */
#include "kernels.h"

#define ADDRESS(name) &name,
const struct mpm_kernel *const mpm_all_kernels[] = {MPM_KERNEL_LIST(ADDRESS)};
const uint32_t mpm_all_kernels_count = sizeof mpm_all_kernels / sizeof mpm_all_kernels[0];

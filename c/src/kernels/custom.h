/* Options of custom operators. */
#ifndef MPM_CUSTOM_H
#define MPM_CUSTOM_H

#include "../kernel.h"

/* Number `index` of the options, which are a FlexBuffer map of whole numbers in the order of their names. */
enum mpm_status mpm_custom_number(struct mpm_prep *p, uint32_t index, int32_t *value);

/* The option of this name, of a map with names and numbers of any kind; `otherwise` where there is none. */
enum mpm_status mpm_custom_named(struct mpm_prep *p, const char *name, float otherwise, float *value);

#endif

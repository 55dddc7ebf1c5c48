/* Where activations, scratch memory and variables lie. */
#ifndef MPM_PLAN_H
#define MPM_PLAN_H

#include "kernel.h"

#define MPM_ALIGN 8u /* of every buffer, bytes */

uint32_t mpm_round_up(uint32_t bytes);

/* Keeps in mind how much of the arena has been in use at once while mpm_init works. */
void mpm_see_peak(struct mpm_prep *p);

/* The kernel of the operator that is open; MPM_NO_KERNEL where the table has none for it and its types. */
enum mpm_status mpm_find_kernel(struct mpm_prep *p, const struct mpm_kernel **found);

/* A new entry of the table of buffers, at the low end; null: the arena is full (mpm_fail has been called). */
struct mpm_buffer *mpm_new_buffer(struct mpm_prep *p, uint32_t tensor, uint32_t bytes);

/* Finds the buffers of a subgraph's tensors and when each is needed. */
enum mpm_status mpm_plan_lifetimes(struct mpm_prep *p, uint32_t *variable_bytes);

/* Places the buffers of a subgraph from `base` on; returns in `end` where they end. Uses the offline plan in the
 * file's metadata where there is one, and else the greedy rule: largest first, each at the lowest free offset. */
enum mpm_status mpm_plan_place(struct mpm_prep *p, uint32_t base, uint32_t *end);

#endif

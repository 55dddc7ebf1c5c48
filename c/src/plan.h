/* Where activations, scratch memory and variables lie. */
#ifndef MPM_PLAN_H
#define MPM_PLAN_H

#include "kernel.h"

#define MPM_ALIGN 8u /* of every buffer, bytes */

uint32_t mpm_round_up(uint32_t bytes);

/* A new entry of the table of buffers, at the low end; null: the arena is full (mpm_fail has been called). */
struct mpm_buffer *mpm_new_buffer(struct mpm_prep *p, uint32_t tensor, uint32_t bytes);

/* Finds the buffers of a subgraph's tensors and when each is needed. */
enum mpm_status mpm_plan_lifetimes(struct mpm_prep *p, uint32_t *variable_bytes);

/* Places the buffers of a subgraph from `base` on; returns in `end` where they end. Uses the offline plan in the
 * file's metadata where there is one, and else the greedy rule: largest first, each at the lowest free offset. */
enum mpm_status mpm_plan_place(struct mpm_prep *p, uint32_t base, uint32_t *end);

#endif

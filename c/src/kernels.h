/* Every kernel there is, by operator. A program's own table lists some of these. */
#ifndef MPM_KERNELS_H
#define MPM_KERNELS_H

#include "kernel.h"

#define MPM_KERNEL_LIST(X) \
    X(mpm_average_pool_2d_s8) \
    X(mpm_average_pool_2d_s16) \
    X(mpm_conv_2d_s8) \
    X(mpm_depthwise_conv_2d_s8) \
    X(mpm_dequantize) \
    X(mpm_expand_dims) \
    X(mpm_fully_connected_s8) \
    X(mpm_max_pool_2d_s8) \
    X(mpm_max_pool_2d_s16) \
    X(mpm_quantize) \
    X(mpm_reshape) \
    X(mpm_softmax_s8) \
    X(mpm_squeeze) \
    X(mpm_svdf_s8) \
    X(mpm_unidirectional_sequence_lstm_s8)

#define MPM_DECLARE(name) extern const struct mpm_kernel name;
MPM_KERNEL_LIST(MPM_DECLARE)

#endif

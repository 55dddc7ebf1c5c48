/* Every kernel there is, by operator. A program's own table lists some of these. */
#ifndef MPM_KERNELS_H
#define MPM_KERNELS_H

#include "kernel.h"

#define MPM_KERNEL_LIST(X) \
    X(mpm_abs) \
    X(mpm_add) \
    X(mpm_arg_max) \
    X(mpm_arg_min) \
    X(mpm_average_pool_2d_f32) \
    X(mpm_average_pool_2d_s16) \
    X(mpm_average_pool_2d_s8) \
    X(mpm_batch_matmul) \
    X(mpm_broadcast_to) \
    X(mpm_call_once) \
    X(mpm_cast) \
    X(mpm_ceil) \
    X(mpm_concatenation) \
    X(mpm_conv_2d_f32) \
    X(mpm_conv_2d_s16) \
    X(mpm_conv_2d_s8) \
    X(mpm_cos) \
    X(mpm_depth_to_space) \
    X(mpm_depthwise_conv_2d_f32) \
    X(mpm_depthwise_conv_2d_s16) \
    X(mpm_depthwise_conv_2d_s8) \
    X(mpm_dequantize) \
    X(mpm_div) \
    X(mpm_elu) \
    X(mpm_equal) \
    X(mpm_exp) \
    X(mpm_expand_dims) \
    X(mpm_floor) \
    X(mpm_floor_div) \
    X(mpm_floor_mod) \
    X(mpm_fully_connected_f32) \
    X(mpm_fully_connected_s16) \
    X(mpm_fully_connected_s8) \
    X(mpm_gather) \
    X(mpm_greater) \
    X(mpm_greater_equal) \
    X(mpm_hard_swish) \
    X(mpm_if) \
    X(mpm_l2_normalization_f32) \
    X(mpm_l2_pool_2d_f32) \
    X(mpm_leaky_relu) \
    X(mpm_less) \
    X(mpm_less_equal) \
    X(mpm_log) \
    X(mpm_log_softmax_f32) \
    X(mpm_logical_and) \
    X(mpm_logical_not) \
    X(mpm_logical_or) \
    X(mpm_logistic_op) \
    X(mpm_max_pool_2d_f32) \
    X(mpm_max_pool_2d_s16) \
    X(mpm_max_pool_2d_s8) \
    X(mpm_maximum) \
    X(mpm_mean) \
    X(mpm_minimum) \
    X(mpm_mirror_pad) \
    X(mpm_mul) \
    X(mpm_neg) \
    X(mpm_not_equal) \
    X(mpm_pack) \
    X(mpm_pad) \
    X(mpm_padv2) \
    X(mpm_quantize) \
    X(mpm_reduce_all) \
    X(mpm_reduce_max) \
    X(mpm_reduce_min) \
    X(mpm_relu) \
    X(mpm_relu6) \
    X(mpm_reshape) \
    X(mpm_reverse_v2) \
    X(mpm_round) \
    X(mpm_rsqrt) \
    X(mpm_select_v2) \
    X(mpm_sin) \
    X(mpm_slice) \
    X(mpm_softmax_f32) \
    X(mpm_softmax_s8) \
    X(mpm_space_to_depth) \
    X(mpm_split) \
    X(mpm_split_v) \
    X(mpm_sqrt) \
    X(mpm_square) \
    X(mpm_squared_difference) \
    X(mpm_squeeze) \
    X(mpm_strided_slice) \
    X(mpm_sub) \
    X(mpm_sum) \
    X(mpm_svdf_s8) \
    X(mpm_tanh_op) \
    X(mpm_transpose) \
    X(mpm_transpose_conv_f32) \
    X(mpm_transpose_conv_s8) \
    X(mpm_unidirectional_sequence_lstm_f32) \
    X(mpm_unidirectional_sequence_lstm_s8) \
    X(mpm_unpack) \
    X(mpm_while)

#define MPM_DECLARE(name) extern const struct mpm_kernel name;
MPM_KERNEL_LIST(MPM_DECLARE)

#endif

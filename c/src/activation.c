#include "fixed.h"

int32_t mpm_quantised(float value, float scale) {
    const float x = value / scale;
    int32_t whole;
    if (x <= -1e9f) return -1000000000;
    if (!(x < 1e9f)) return 1000000000;
    whole = (int32_t)x;
    if (x - (float)whole >= 0.5f) return whole + 1;
    if (x - (float)whole <= -0.5f) return whole - 1;
    return whole;
}

MPM_ONCE enum mpm_status mpm_activation_range(struct mpm_prep *p, uint32_t activation, const struct mpm_tensor *out,
                                     int32_t *low, int32_t *high) {
    const int is_16 = out->type == MPM_INT16;
    const int32_t zero = out->zero_point;
    int32_t at;
    *low = is_16 ? -32768 : -128;
    *high = is_16 ? 32767 : 127;
    if (activation == 0) return MPM_OK;
    MPM_SUPPORT(p, activation <= 3, "the fused activation is not NONE, RELU, RELU_N1_TO_1 or RELU6");
    at = zero + (activation == 2 ? mpm_quantised(-1.0f, out->scale) : 0);
    if (at > *low) *low = at;
    at = zero + mpm_quantised(activation == 3 ? 6.0f : 1.0f, out->scale);
    if (activation != 1 && at < *high) *high = at;
    if (*low > *high) *low = *high;
    return MPM_OK;
}

MPM_ONCE enum mpm_status mpm_activation_range_f32(struct mpm_prep *p, uint32_t activation, float *low, float *high) {
    MPM_SUPPORT(p, activation <= 3, "the fused activation is not NONE, RELU, RELU_N1_TO_1 or RELU6");
    *low = activation == 0 ? -3.402823466e38f : activation == 2 ? -1.0f : 0.0f;
    *high = activation == 2 ? 1.0f : activation == 3 ? 6.0f : 3.402823466e38f;
    return MPM_OK;
}

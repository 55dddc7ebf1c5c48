/* TFLite_Detection_PostProcess: from what a detector says of each anchor to a list of detections (arXiv:1512.02325).
 * Boxes are decoded; in each class the best suppress those that overlap them; the best of all classes stay. float32,
 * and `use_regular_nms` alone. */
#include "custom.h"

#include <math.h>
#include <string.h>

/* y and x of a corner, then those of the opposite one; of an anchor or an offset: y, x, height, width. */
struct box {
    float a[4];
};

/* 88 bytes on a 32-bit chip. Scratch memory: 20 bytes an anchor, 4 for each that a class may keep. */
struct detections {
    const struct box *codes, *anchors;
    const float *scores; /* [count][width] */
    struct box *box_out;
    float *class_out, *score_out, *number_out;
    struct box *boxes;  /* [count] */
    uint32_t *order;    /* [count] */
    uint32_t *selected; /* [each] */
    uint32_t count, width, classes, each, most;
    float score, overlap;
    struct box scale;
};

static void decode(const struct detections *d) {
    uint32_t i, k;
    for (i = 0; i < d->count; i++) {
        const float *code = d->codes[i].a, *anchor = d->anchors[i].a;
        for (k = 0; k < 2; k++) {
            const float centre = code[k] / d->scale.a[k] * anchor[k + 2] + anchor[k];
            const float half = 0.5f * expf(code[k + 2] / d->scale.a[k + 2]) * anchor[k + 2];
            d->boxes[i].a[k] = centre - half;
            d->boxes[i].a[k + 2] = centre + half;
        }
    }
}

static float area(const struct box *b) { return (b->a[2] - b->a[0]) * (b->a[3] - b->a[1]); }

static float iou(const struct box *b, const struct box *c) {
    const float first = area(b), second = area(c);
    struct box both;
    float shared;
    uint32_t k;
    if (!(first > 0.0f && second > 0.0f)) return 0.0f;
    for (k = 0; k < 2; k++) {
        both.a[k] = b->a[k] > c->a[k] ? b->a[k] : c->a[k];
        both.a[k + 2] = b->a[k + 2] < c->a[k + 2] ? b->a[k + 2] : c->a[k + 2];
        if (both.a[k + 2] < both.a[k]) both.a[k + 2] = both.a[k];
    }
    shared = area(&both);
    return shared / (first + second - shared);
}

static float score_of(const struct detections *d, uint32_t class, uint32_t anchor) {
    return d->scores[anchor * d->width + d->width - d->classes + class];
}

/* The anchors of a class that are good enough by falling score, of equals the first first; returns their number. */
static uint32_t sort(const struct detections *d, uint32_t class) {
    uint32_t n = 0, gap, i, k;
    for (i = 0; i < d->count; i++)
        if (score_of(d, class, i) >= d->score) d->order[n++] = i;
    for (gap = n / 2; gap > 0; gap /= 2)
        for (i = gap; i < n; i++) {
            const uint32_t moved = d->order[i];
            const float score = score_of(d, class, moved);
            for (k = i; k >= gap; k -= gap) {
                const uint32_t before = d->order[k - gap];
                const float other = score_of(d, class, before);
                if (other > score || (!(other < score) && before < moved)) break;
                d->order[k] = before;
            }
            d->order[k] = moved;
        }
    return n;
}

/* Puts a detection behind those that are as good; returns how many there are. */
static uint32_t insert(const struct detections *d, uint32_t n, uint32_t class, uint32_t anchor) {
    const float score = score_of(d, class, anchor);
    uint32_t k = n;
    if (n == d->most) {
        if (!(d->score_out[n - 1] < score)) return n;
        k = n - 1;
    } else n++;
    for (; k > 0 && d->score_out[k - 1] < score; k--) {
        d->score_out[k] = d->score_out[k - 1];
        d->class_out[k] = d->class_out[k - 1];
        d->box_out[k] = d->box_out[k - 1];
    }
    d->score_out[k] = score;
    d->class_out[k] = (float)class;
    d->box_out[k] = d->boxes[anchor];
    return n;
}

static enum mpm_status run(struct mpm_interpreter *m, const void *params) {
    const struct detections *d = params;
    uint32_t class, n = 0;
    (void)m;
    decode(d);
    memset(d->box_out, 0, d->most * sizeof *d->box_out);
    memset(d->class_out, 0, d->most * sizeof *d->class_out);
    memset(d->score_out, 0, d->most * sizeof *d->score_out);
    for (class = 0; class < d->classes; class++) {
        const uint32_t candidates = sort(d, class);
        uint32_t i, k, kept = 0;
        for (i = 0; i < candidates && kept < d->each; i++) {
            const uint32_t anchor = d->order[i];
            for (k = 0; k < kept; k++)
                if (iou(&d->boxes[d->selected[k]], &d->boxes[anchor]) > d->overlap) break;
            if (k < kept) continue;
            d->selected[kept++] = anchor;
            n = insert(d, n, class, anchor);
        }
    }
    *d->number_out = (float)n;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status floats(struct mpm_prep *p, int out, uint32_t i, struct mpm_tensor *t) {
    MPM_TRY(out ? mpm_out(p, i, t) : mpm_in(p, i, t));
    MPM_SUPPORT(p, t->type == MPM_FLOAT32, "an input or output is not float32");
    return MPM_OK;
}

static MPM_ONCE enum mpm_status whole(struct mpm_prep *p, const char *name, float otherwise, uint32_t *value) {
    float number;
    MPM_TRY(mpm_custom_named(p, name, otherwise, &number));
    MPM_NEED(p, number >= 1.0f && number <= 65535.0f, "a number of classes or detections is out of range");
    *value = (uint32_t)number;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status read_options(struct mpm_prep *p, struct detections *d) {
    static const char *const scales[] = {"y_scale", "x_scale", "h_scale", "w_scale"};
    float regular;
    uint32_t k;
    MPM_TRY(mpm_custom_named(p, "use_regular_nms", 0.0f, &regular));
    MPM_SUPPORT(p, regular > 0.0f, "suppression over all classes at once; set use_regular_nms");
    MPM_TRY(whole(p, "max_detections", 0.0f, &d->most));
    MPM_TRY(whole(p, "detections_per_class", 100.0f, &d->each));
    MPM_TRY(whole(p, "num_classes", 0.0f, &d->classes));
    if (d->each > d->most) d->each = d->most;
    MPM_TRY(mpm_custom_named(p, "nms_score_threshold", 0.0f, &d->score));
    MPM_TRY(mpm_custom_named(p, "nms_iou_threshold", 0.0f, &d->overlap));
    for (k = 0; k < 4; k++) {
        MPM_TRY(mpm_custom_named(p, scales[k], 0.0f, &d->scale.a[k]));
        MPM_NEED(p, d->scale.a[k] > 0.0f, "a scale of the offsets is not above 0");
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare(struct mpm_prep *p) {
    struct mpm_tensor codes, scores, anchors, box, class, score, number;
    struct detections *d = mpm_keep(p, sizeof *d);
    if (d == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(read_options(p, d));
    MPM_TRY(floats(p, 0, 0, &codes));
    MPM_TRY(floats(p, 0, 1, &scores));
    MPM_TRY(floats(p, 0, 2, &anchors));
    MPM_TRY(floats(p, 1, 0, &box));
    MPM_TRY(floats(p, 1, 1, &class));
    MPM_TRY(floats(p, 1, 2, &score));
    MPM_TRY(floats(p, 1, 3, &number));
    MPM_NEED(p, anchors.rank == 2 && anchors.dims[1] == 4 && codes.rank == 3 && scores.rank == 3,
             "offsets, scores or anchors are of another shape");
    d->count = anchors.count / 4;
    MPM_NEED(p, codes.count == anchors.count && codes.dims[2] == 4 && codes.dims[0] == 1 && d->count > 0 &&
                    scores.dims[0] == 1 && scores.dims[1] == codes.dims[1],
             "offsets, scores and anchors differ in number");
    d->width = (uint32_t)scores.dims[2];
    MPM_NEED(p, d->classes == d->width || d->classes + 1 == d->width, "there are more or fewer classes than scores");
    MPM_NEED(p, box.count == 4 * d->most && class.count == d->most && score.count == d->most && number.count == 1,
             "an output has another shape than the detections");
    d->codes = codes.data;
    d->scores = scores.data;
    d->anchors = anchors.data;
    d->box_out = box.data;
    d->class_out = class.data;
    d->score_out = score.data;
    d->number_out = number.data;
    d->boxes = mpm_scratch(p, d->count * (uint32_t)sizeof *d->boxes);
    d->order = mpm_scratch(p, d->count * (uint32_t)sizeof *d->order);
    d->selected = mpm_scratch(p, d->each * (uint32_t)sizeof *d->selected);
    p->run = run;
    p->params = d;
    return MPM_OK;
}

const struct mpm_kernel mpm_detection_postprocess = {MPM_OP_CUSTOM, MPM_ANY_TYPE, 0, "TFLite_Detection_PostProcess",
                                                     prepare};

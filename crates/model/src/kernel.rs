//! Matrix products (by the `gemm` crate, which picks AVX2 or AVX-512 at run time) and the vector
//! maths around them, written so that the compiler vectorises it.

use crate::device::{Operand, Source};

/// A read-only matrix view over a slice.
#[derive(Debug, Clone, Copy)]
pub struct Mat<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

fn fits(len: usize, rows: usize, columns: usize, row_stride: usize, column_stride: usize) -> bool {
    rows == 0 || columns == 0 || (rows - 1) * row_stride + (columns - 1) * column_stride < len
}

impl<'a> Mat<'a> {
    /// `rows` × `columns`, rows `stride` apart.
    ///
    /// # Panics
    /// When the slice is too short.
    #[must_use]
    pub fn new(data: &'a [f32], rows: usize, columns: usize, stride: usize) -> Self {
        assert!(
            fits(data.len(), rows, columns, stride, 1),
            "matrix of {rows}x{columns} in {} floats",
            data.len()
        );
        Self {
            data,
            rows,
            columns,
            row_stride: stride,
            column_stride: 1,
        }
    }

    /// Dense rows.
    #[must_use]
    pub fn dense(data: &'a [f32], rows: usize, columns: usize) -> Self {
        Self::new(data, rows, columns, columns)
    }

    /// The transpose; nothing is copied.
    #[must_use]
    pub fn t(self) -> Self {
        Self {
            data: self.data,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// For a device that holds `weights`: a view of them is named by its place.
    pub(crate) fn operand(&self, weights: &[f32]) -> Operand<'a> {
        let first = self.data.as_ptr();
        let source = if weights.as_ptr_range().contains(&first) {
            Source::Weights((first.addr() - weights.as_ptr().addr()) / size_of::<f32>())
        } else {
            Source::Memory(self.data)
        };
        Operand {
            source,
            rows: self.rows,
            columns: self.columns,
            row_stride: self.row_stride,
            column_stride: self.column_stride,
        }
    }
}

/// How many threads a product may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// This one.
    One,
    /// All of the rayon pool that we are in.
    All,
}

/// `c = beta * c + alpha * a * b`, with `c` a view of `a.rows` × `b.columns` whose rows are
/// `stride` apart. `beta` 0 does not read `c`.
///
/// # Panics
/// When the shapes do not fit or `c` is too short.
pub fn matmul(
    c: &mut [f32],
    stride: usize,
    beta: f32,
    alpha: f32,
    a: Mat<'_>,
    b: Mat<'_>,
    threads: Threads,
) {
    assert_eq!(a.columns, b.rows, "inner sizes of a product differ");
    assert!(
        fits(c.len(), a.rows, b.columns, stride, 1),
        "result of a product does not fit"
    );
    if a.rows == 0 || b.columns == 0 {
        return;
    }
    let parallelism = match threads {
        Threads::One => gemm::Parallelism::None,
        Threads::All => gemm::Parallelism::Rayon(0),
    };
    #[expect(
        unsafe_code,
        reason = "gemm takes raw pointers; `fits` has checked every view against its slice"
    )]
    // SAFETY: the last element of each of the three views lies inside its slice (checked above and
    // in `Mat::new`), strides are in elements, `c` is exclusively borrowed and so does not overlap.
    unsafe {
        gemm::gemm(
            a.rows,
            b.columns,
            a.columns,
            c.as_mut_ptr(),
            1,
            stride as isize,
            beta != 0.0,
            a.data.as_ptr(),
            a.column_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.column_stride as isize,
            b.row_stride as isize,
            beta,
            alpha,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// e^x in f32, relative error below 2e-7, flushing to 0 below -87 (Cody-Waite reduction and a
/// polynomial of degree 6); unlike the library's it vectorises.
#[inline(always)]
#[must_use]
pub fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.0, 88.0);
    let n = (clamped * std::f32::consts::LOG2_E).round_ties_even();
    let r = (-n).mul_add(LN2_HIGH, clamped);
    let r = (-n).mul_add(LN2_LOW, r);
    let mut p = 1.388_888_9e-3_f32;
    p = p.mul_add(r, 8.333_333e-3);
    p = p.mul_add(r, 4.166_666_8e-2);
    p = p.mul_add(r, 0.166_666_67);
    p = p.mul_add(r, 0.5);
    p = p.mul_add(r, 1.0);
    p = p.mul_add(r, 1.0);
    let scale = f32::from_bits(((n as i32 + 127) << 23) as u32);
    if x < -87.0 { 0.0 } else { p * scale }
}

const LANES: usize = 16;

/// Sum of products. Fixed order of additions, so the result does not depend on the caller.
#[must_use]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let mut tail = 0.0;
    for (x, y) in a_chunks.remainder().iter().zip(b_chunks.remainder()) {
        tail += x * y;
    }
    for (x, y) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            lanes[lane] = x[lane].mul_add(y[lane], lanes[lane]);
        }
    }
    lanes.iter().sum::<f32>() + tail
}

/// `y += alpha * x`.
pub fn axpy(y: &mut [f32], alpha: f32, x: &[f32]) {
    for (target, value) in y.iter_mut().zip(x) {
        *target = alpha.mul_add(*value, *target);
    }
}

/// `y += x`.
pub fn add(y: &mut [f32], x: &[f32]) {
    for (target, value) in y.iter_mut().zip(x) {
        *target += value;
    }
}

/// The largest value; negative infinity of none.
#[must_use]
pub fn max(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = values.chunks_exact(LANES);
    let mut largest = chunks
        .remainder()
        .iter()
        .copied()
        .fold(f32::NEG_INFINITY, f32::max);
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = if chunk[lane] > lanes[lane] {
                chunk[lane]
            } else {
                lanes[lane]
            };
        }
    }
    for lane in lanes {
        largest = largest.max(lane);
    }
    largest
}

/// Replaces every value by `exp(value - shift)` and returns the sum.
pub fn exp_shifted(values: &mut [f32], shift: f32) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let mut chunks = values.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for lane in 0..LANES {
            chunk[lane] = exp(chunk[lane] - shift);
            lanes[lane] += chunk[lane];
        }
    }
    let mut tail = 0.0;
    for value in chunks.into_remainder() {
        *value = exp(*value - shift);
        tail += *value;
    }
    lanes.iter().sum::<f32>() + tail
}

/// [`exp_shifted`] that also returns Σ e^s·s over the shifted values, for entropies. The first sum
/// has the same bits.
pub fn exp_shifted_weighted(values: &mut [f32], shift: f32) -> (f32, f32) {
    let (mut lanes, mut weighted) = ([0.0_f32; LANES], [0.0_f32; LANES]);
    let mut chunks = values.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for lane in 0..LANES {
            let shifted = chunk[lane] - shift;
            chunk[lane] = exp(shifted);
            lanes[lane] += chunk[lane];
            weighted[lane] = chunk[lane].mul_add(shifted, weighted[lane]);
        }
    }
    let (mut tail, mut tail_weighted) = (0.0, 0.0);
    for value in chunks.into_remainder() {
        let shifted = *value - shift;
        *value = exp(shifted);
        tail += *value;
        tail_weighted += *value * shifted;
    }
    let sum = |lanes: [f32; LANES]| lanes.iter().sum::<f32>();
    (sum(lanes) + tail, sum(weighted) + tail_weighted)
}

/// RMS norm of every row of `x` (`width` wide) into `out`; `inverse` gets 1/rms of every row.
pub fn rms_norm(out: &mut [f32], inverse: &mut [f32], x: &[f32], weight: &[f32], epsilon: f32) {
    let width = weight.len();
    for ((row_out, row), inverse_rms) in out
        .chunks_exact_mut(width)
        .zip(x.chunks_exact(width))
        .zip(inverse)
    {
        let scale = 1.0 / (dot(row, row) / width as f32 + epsilon).sqrt();
        *inverse_rms = scale;
        for ((target, value), w) in row_out.iter_mut().zip(row).zip(weight) {
            *target = value * scale * w;
        }
    }
}

/// Backward of [`rms_norm`]: adds to `dx` (or replaces it) and to `dweight`.
pub fn rms_norm_backward(
    dx: &mut [f32],
    replace: bool,
    dweight: &mut [f32],
    dout: &[f32],
    x: &[f32],
    weight: &[f32],
    inverse: &[f32],
) {
    let width = weight.len();
    let rows = dx
        .chunks_exact_mut(width)
        .zip(dout.chunks_exact(width))
        .zip(x.chunks_exact(width))
        .zip(inverse);
    for (((row_dx, row_dout), row), scale) in rows {
        let mut projection = 0.0;
        for i in 0..width {
            let normed = row[i] * scale;
            dweight[i] = row_dout[i].mul_add(normed, dweight[i]);
        }
        for i in 0..width {
            projection = (row_dout[i] * weight[i]).mul_add(row[i], projection);
        }
        let back = projection * scale * scale * scale / width as f32;
        for i in 0..width {
            let gradient = row_dout[i] * weight[i] * scale - row[i] * back;
            row_dx[i] = if replace {
                gradient
            } else {
                row_dx[i] + gradient
            };
        }
    }
}

/// `out = silu(gate) * up`.
pub fn swiglu(out: &mut [f32], gate: &[f32], up: &[f32]) {
    for ((target, g), u) in out.iter_mut().zip(gate).zip(up) {
        *target = g / (1.0 + exp(-g)) * u;
    }
}

/// Backward of [`swiglu`]: on entry `dgate` holds the gradient of the output; on exit `dgate` and
/// `dup` hold those of the inputs.
pub fn swiglu_backward(dgate: &mut [f32], dup: &mut [f32], gate: &[f32], up: &[f32]) {
    for (((dg, du), g), u) in dgate.iter_mut().zip(dup).zip(gate).zip(up) {
        let sigmoid = 1.0 / (1.0 + exp(-g));
        let silu = g * sigmoid;
        let dout = *dg;
        *du = dout * silu;
        *dg = dout * u * (sigmoid * (1.0 - silu) + silu);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_exact_enough() {
        for i in -8700..8800 {
            let x = i as f32 / 100.0;
            let truth = f64::from(x).exp();
            let error = ((f64::from(exp(x)) - truth) / truth).abs();
            assert!(error < 3e-7, "exp({x}): {error:e}");
        }
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn products_take_strides_and_transposes() {
        let a = [1.0, 2.0, 9.0, 3.0, 4.0, 9.0];
        let b = [5.0, 6.0, 7.0, 8.0];
        let mut c = [0.0; 4];
        matmul(
            &mut c,
            2,
            0.0,
            1.0,
            Mat::new(&a, 2, 2, 3),
            Mat::dense(&b, 2, 2),
            Threads::One,
        );
        assert_eq!(c, [19.0, 22.0, 43.0, 50.0]);
        matmul(
            &mut c,
            2,
            1.0,
            1.0,
            Mat::new(&a, 2, 2, 3).t(),
            Mat::dense(&b, 2, 2).t(),
            Threads::One,
        );
        assert_eq!(c, [42.0, 53.0, 77.0, 96.0]);
    }
}

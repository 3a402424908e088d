//! Products of activations with weights for decoding: each result is one fixed sequence of
//! additions over the inner width, so a row's results do not depend on how many other rows there
//! are. That is what makes a reply the same bits in any company.
//!
//! Activations and weights both lie along the inner width, so nothing is packed: with one row the
//! weights are read once at the speed of memory, and with more rows each weight that is in a
//! register serves four of them. Libraries for matrix products pack their operands, which with few
//! rows costs more than the product, and take other paths at other sizes.

/// Partial sums of one result.
const LANES: usize = 8;
/// Rows and outputs of a full tile: with its operands it fills the sixteen vector registers. (Other
/// shapes of as many registers were tried; the compiler keeps only this one in them.)
const ROWS: usize = 4;
const OUTPUTS: usize = 3;

/// `out[r][o] = Σ x[r][i] · weights[o][i]`: rows of `width` in `x` and `weights`, results densely
/// row by row.
///
/// # Panics
/// When a length is not a multiple of `width`, or `out` is not of rows times outputs.
pub fn row_products(out: &mut [f32], x: &[f32], weights: &[f32], width: usize) {
    let (rows, outputs) = (x.len() / width, weights.len() / width);
    assert!(
        rows * width == x.len() && outputs * width == weights.len() && rows * outputs == out.len(),
        "{rows} rows of {width} with {outputs} outputs in {} results",
        out.len()
    );
    Operands {
        x,
        weights,
        width,
        rows,
        outputs,
    }
    .sweep(out);
}

struct Operands<'a> {
    x: &'a [f32],
    weights: &'a [f32],
    width: usize,
    rows: usize,
    outputs: usize,
}

impl Operands<'_> {
    fn row(&self, at: usize) -> &[f32] {
        &self.x[at * self.width..(at + 1) * self.width]
    }

    fn weight(&self, at: usize) -> &[f32] {
        &self.weights[at * self.width..(at + 1) * self.width]
    }

    /// All results, tile by tile.
    fn sweep(&self, out: &mut [f32]) {
        let mut o = 0;
        while o + OUTPUTS <= self.outputs {
            let own: [&[f32]; OUTPUTS] = std::array::from_fn(|at| self.weight(o + at));
            let mut r = 0;
            while r + ROWS <= self.rows {
                let rows: [&[f32]; ROWS] = std::array::from_fn(|at| self.row(r + at));
                put(out, self.outputs, (r, o), tile(rows, own));
                r += ROWS;
            }
            for r in r..self.rows {
                put(out, self.outputs, (r, o), tile([self.row(r)], own));
            }
            o += OUTPUTS;
        }
        for o in o..self.outputs {
            for r in 0..self.rows {
                let one = tile([self.row(r)], [self.weight(o)]);
                put(out, self.outputs, (r, o), one);
            }
        }
    }
}

#[inline(always)]
fn put<const R: usize, const O: usize>(
    out: &mut [f32],
    outputs: usize,
    (row, output): (usize, usize),
    found: [[f32; O]; R],
) {
    for (at, results) in found.into_iter().enumerate() {
        let from = (row + at) * outputs + output;
        out[from..from + O].copy_from_slice(&results);
    }
}

/// The results of some rows with some outputs. Every one is computed in the same order, whatever
/// the tile: lane by lane, then the lanes, then what does not fill them.
#[inline(always)]
fn tile<const R: usize, const O: usize>(x: [&[f32]; R], weights: [&[f32]; O]) -> [[f32; O]; R] {
    let (whole, _) = x[0].as_chunks::<LANES>();
    let count = whole.len();
    let own: [&[[f32; LANES]]; R] = x.map(|line| &line.as_chunks().0[..count]);
    let other: [&[[f32; LANES]]; O] = weights.map(|line| &line.as_chunks().0[..count]);
    let mut lanes = [[[0.0_f32; LANES]; O]; R];
    for at in 0..count {
        for r in 0..R {
            for o in 0..O {
                for lane in 0..LANES {
                    lanes[r][o][lane] =
                        own[r][at][lane].mul_add(other[o][at][lane], lanes[r][o][lane]);
                }
            }
        }
    }
    let mut found = [[0.0; O]; R];
    for r in 0..R {
        for o in 0..O {
            let [a, b, c, d, e, f, g, h] = lanes[r][o];
            let mut sum = ((a + e) + (c + g)) + ((b + f) + (d + h));
            let rest = count * LANES;
            for (value, weight) in x[r][rest..].iter().zip(&weights[o][rest..]) {
                sum = value.mul_add(*weight, sum);
            }
            found[r][o] = sum;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(i: usize) -> f32 {
        ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0
    }

    #[test]
    fn results_are_those_of_the_plain_sum() {
        for (rows, outputs, width) in [(1, 1, 1), (3, 5, 7), (4, 3, 8), (9, 11, 33), (5, 64, 192)] {
            let x: Vec<f32> = (0..rows * width).map(value).collect();
            let weights: Vec<f32> = (0..outputs * width).map(|i| value(i + 77)).collect();
            let mut out = vec![f32::NAN; rows * outputs];
            row_products(&mut out, &x, &weights, width);
            for (at, found) in out.iter().enumerate() {
                let (r, o) = (at / outputs, at % outputs);
                let line = x[r * width..].iter().zip(&weights[o * width..]);
                let expected: f64 = line
                    .take(width)
                    .map(|(a, b)| f64::from(*a) * f64::from(*b))
                    .sum();
                let error = (f64::from(*found) - expected).abs();
                assert!(
                    error < 1e-5 * width as f64,
                    "{rows}x{outputs}x{width}: {error}"
                );
            }
        }
    }

    /// What decoding relies on.
    #[test]
    fn a_row_does_not_depend_on_its_company() {
        for (width, outputs) in [(32, 64), (40, 32), (41, 37), (192, 300), (512, 192)] {
            let x: Vec<f32> = (0..70 * width).map(value).collect();
            let weights: Vec<f32> = (0..outputs * width).map(|i| value(i + 77)).collect();
            let product = |rows: std::ops::Range<usize>| {
                let mut out = vec![0.0; rows.len() * outputs];
                let x = &x[rows.start * width..rows.end * width];
                row_products(&mut out, x, &weights, width);
                out
            };
            let all = product(0..70);
            for from in 0..4 {
                for count in (1..30).chain([64]) {
                    let own = &all[from * outputs..(from + count) * outputs];
                    assert!(
                        product(from..from + count) == own,
                        "{count} rows from {from}"
                    );
                }
            }
        }
    }
}

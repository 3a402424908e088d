//! Products of activations with weights for decoding: each result is one fixed sequence of
//! additions over the inner width, so a row's results do not depend on how many other rows there
//! are. That is what makes a reply the same bits in any company.
//!
//! Libraries choose other paths at other sizes, so these are our own. Weights are packed once per
//! version of the policy ([`Panels`]): `WIDE` outputs side by side, so that one row streams them
//! from memory in one direction, and many rows keep a panel in the cache. A result is the sum over
//! stretches of `DEPTH` products, each stretch added up in order with fused multiply-adds.
//! AVX-512, AVX2 and the plain loop do exactly that, lane by lane: they give the same bits.

/// Outputs of a panel.
const WIDE: usize = 32;
/// Products of a stretch: a stretch of a panel fills half of the first-level cache.
const DEPTH: usize = 256;
/// Rows of a tile, largest first; with two vectors of outputs each they fill the registers.
const TILES_AVX512: &[usize] = &[12, 8, 6, 4, 2, 1];
const TILES_AVX2: &[usize] = &[6, 4, 2, 1];

/// Which instructions are used. All give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Instructions {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Plain,
}

impl Instructions {
    fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Self::Avx2;
            }
        }
        Self::Plain
    }

    fn tiles(self) -> &'static [usize] {
        #[cfg(target_arch = "x86_64")]
        if self == Self::Avx512 {
            return TILES_AVX512;
        }
        TILES_AVX2
    }

    #[inline]
    fn tile<const R: usize>(self, x: &[[f32; R]], panel: &[[f32; WIDE]]) -> [[f32; WIDE]; R] {
        match self {
            #[cfg(target_arch = "x86_64")]
            #[expect(unsafe_code, reason = "the instructions were found on this machine")]
            // SAFETY: `best` (and the tests) make these variants only where the processor has them.
            Self::Avx512 => unsafe { x86::tile_avx512(x, panel) },
            #[cfg(target_arch = "x86_64")]
            #[expect(unsafe_code, reason = "the instructions were found on this machine")]
            // SAFETY: as above.
            Self::Avx2 => unsafe { x86::tile_avx2(x, panel) },
            Self::Plain => tile_plain(x, panel),
        }
    }
}

/// A matrix of weights, packed for [`Panels::products`]. Takes as much memory as the matrix.
#[derive(Debug)]
pub struct Panels {
    /// Panel by panel, inner index by inner index, [`WIDE`] outputs. The last panel is filled up
    /// with zeros.
    data: Vec<[f32; WIDE]>,
    width: usize,
    outputs: usize,
    instructions: Instructions,
}

/// Rows that are computed together: where they start and how many.
type Tile = (usize, usize);

impl Panels {
    /// Packs `weights`, rows of `width` (one per output).
    ///
    /// # Panics
    /// When `weights` is not whole rows.
    #[must_use]
    pub fn pack(weights: &[f32], width: usize) -> Self {
        let outputs = weights.len() / width;
        assert!(
            outputs * width == weights.len(),
            "{} weights in rows of {width}",
            weights.len()
        );
        let mut data = vec![[0.0; WIDE]; outputs.div_ceil(WIDE) * width];
        for (rows, panel) in weights
            .chunks(WIDE * width)
            .zip(data.chunks_exact_mut(width))
        {
            for (lane, row) in rows.chunks_exact(width).enumerate() {
                for (line, weight) in panel.iter_mut().zip(row) {
                    line[lane] = *weight;
                }
            }
        }
        Self {
            data,
            width,
            outputs,
            instructions: Instructions::best(),
        }
    }

    /// `out[r][o] = Σ x[r][i] · weights[o][i]`: rows of the packed width in `x`, results densely
    /// row by row.
    ///
    /// # Panics
    /// When `x` is not whole rows, or `out` is not rows times outputs.
    pub fn products(&self, out: &mut [f32], x: &[f32]) {
        let rows = x.len() / self.width;
        assert!(
            rows * self.width == x.len() && rows * self.outputs == out.len(),
            "{} activations in rows of {} with {} outputs in {} results",
            x.len(),
            self.width,
            self.outputs,
            out.len()
        );
        let tiles = self.tiles(rows);
        let x = self.interleave(x, &tiles);
        for (index, panel) in self.data.chunks_exact(self.width).enumerate() {
            let output = index * WIDE;
            for (part, lines) in panel.chunks(DEPTH).enumerate() {
                for &(row, count) in &tiles {
                    let own = &x[row * self.width..(row + count) * self.width];
                    let own = &own[part * DEPTH * count..][..lines.len() * count];
                    let out = &mut out[row * self.outputs..];
                    let place = (output, part == 0);
                    match count {
                        12 => self.add_tile::<12>(out, own, lines, place),
                        8 => self.add_tile::<8>(out, own, lines, place),
                        6 => self.add_tile::<6>(out, own, lines, place),
                        4 => self.add_tile::<4>(out, own, lines, place),
                        2 => self.add_tile::<2>(out, own, lines, place),
                        _ => self.add_tile::<1>(out, own, lines, place),
                    }
                }
            }
        }
    }

    /// Cuts rows into tiles, largest first.
    fn tiles(&self, rows: usize) -> Vec<Tile> {
        let mut tiles = Vec::with_capacity(rows / 6 + 3);
        let mut row = 0;
        for &count in self.instructions.tiles() {
            while row + count <= rows {
                tiles.push((row, count));
                row += count;
            }
        }
        tiles
    }

    /// Per tile, inner index by inner index, one number of each of its rows: a tile reads them in
    /// one stream.
    fn interleave(&self, x: &[f32], tiles: &[Tile]) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        for &(row, count) in tiles {
            let range = row * self.width..(row + count) * self.width;
            let own = &mut out[range.clone()];
            for (at, line) in x[range].chunks_exact(self.width).enumerate() {
                for (group, value) in own.chunks_exact_mut(count).zip(line) {
                    group[at] = *value;
                }
            }
        }
        out
    }

    #[inline]
    fn add_tile<const R: usize>(
        &self,
        out: &mut [f32],
        x: &[f32],
        lines: &[[f32; WIDE]],
        (output, first): (usize, bool),
    ) {
        let (x, _) = x.as_chunks::<R>();
        let found = self.instructions.tile::<R>(x, lines);
        let wide = WIDE.min(self.outputs - output);
        for (row, results) in found.iter().enumerate() {
            let from = row * self.outputs + output;
            let place = &mut out[from..from + wide];
            if first {
                place.copy_from_slice(&results[..wide]);
            } else {
                crate::kernel::add(place, &results[..wide]);
            }
        }
    }
}

/// What the other two do with vectors.
fn tile_plain<const R: usize>(x: &[[f32; R]], panel: &[[f32; WIDE]]) -> [[f32; WIDE]; R] {
    let mut sums = [[0.0_f32; WIDE]; R];
    for (values, line) in x.iter().zip(panel) {
        for (sums, value) in sums.iter_mut().zip(values) {
            for (sum, weight) in sums.iter_mut().zip(line) {
                *sum = value.mul_add(*weight, *sum);
            }
        }
    }
    sums
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    #![expect(
        unsafe_code,
        reason = "vector loads and stores; the compiler keeps these tiles in registers only when it is told to"
    )]

    use std::arch::x86_64::{
        _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps,
        _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
    };

    use super::WIDE;

    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn tile_avx512<const R: usize>(
        x: &[[f32; R]],
        panel: &[[f32; WIDE]],
    ) -> [[f32; WIDE]; R] {
        let mut sums = [[_mm512_setzero_ps(); 2]; R];
        for (values, line) in x.iter().zip(panel) {
            let [low, high] = halves(line);
            // SAFETY: a half has the sixteen floats of a vector.
            let (low, high) = unsafe { (_mm512_loadu_ps(low), _mm512_loadu_ps(high)) };
            for (sum, value) in sums.iter_mut().zip(values) {
                let value = _mm512_set1_ps(*value);
                sum[0] = _mm512_fmadd_ps(value, low, sum[0]);
                sum[1] = _mm512_fmadd_ps(value, high, sum[1]);
            }
        }
        let mut found = [[0.0; WIDE]; R];
        for (found, sum) in found.iter_mut().zip(sums) {
            let (low, high) = found.split_at_mut(WIDE / 2);
            // SAFETY: a half has room for the sixteen floats of a vector.
            unsafe {
                _mm512_storeu_ps(low.as_mut_ptr(), sum[0]);
                _mm512_storeu_ps(high.as_mut_ptr(), sum[1]);
            }
        }
        found
    }

    fn halves(line: &[f32; WIDE]) -> [*const f32; 2] {
        let (low, high) = line.split_at(WIDE / 2);
        [low.as_ptr(), high.as_ptr()]
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn tile_avx2<const R: usize>(
        x: &[[f32; R]],
        panel: &[[f32; WIDE]],
    ) -> [[f32; WIDE]; R] {
        let mut found = [[0.0; WIDE]; R];
        if R > 2 {
            // Half of a panel at a time: two vectors of outputs for each of up to six rows.
            stretch::<R, 2>(&mut found, x, panel, 0);
            stretch::<R, 2>(&mut found, x, panel, WIDE / 2);
        } else {
            stretch::<R, 4>(&mut found, x, panel, 0);
        }
        found
    }

    /// `V` vectors of eight outputs from `start`.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn stretch<const R: usize, const V: usize>(
        found: &mut [[f32; WIDE]; R],
        x: &[[f32; R]],
        panel: &[[f32; WIDE]],
        start: usize,
    ) {
        assert!(start + V * 8 <= WIDE, "a stretch inside of the panel");
        let mut sums = [[_mm256_setzero_ps(); V]; R];
        for (values, line) in x.iter().zip(panel) {
            let mut weights = [_mm256_setzero_ps(); V];
            for (at, weight) in weights.iter_mut().enumerate() {
                // SAFETY: the assertion says that these eight floats are inside of the line.
                *weight = unsafe { _mm256_loadu_ps(line.as_ptr().add(start + at * 8)) };
            }
            for (sum, value) in sums.iter_mut().zip(values) {
                let value = _mm256_set1_ps(*value);
                for (sum, weight) in sum.iter_mut().zip(weights) {
                    *sum = _mm256_fmadd_ps(value, weight, *sum);
                }
            }
        }
        for (found, sum) in found.iter_mut().zip(sums) {
            for (at, sum) in sum.into_iter().enumerate() {
                // SAFETY: as above.
                unsafe { _mm256_storeu_ps(found.as_mut_ptr().add(start + at * 8), sum) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(i: usize) -> f32 {
        ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0
    }

    fn packed(outputs: usize, width: usize) -> (Vec<f32>, Panels) {
        let weights: Vec<f32> = (0..outputs * width).map(|i| value(i + 77)).collect();
        let panels = Panels::pack(&weights, width);
        (weights, panels)
    }

    #[test]
    fn results_are_those_of_the_plain_sum() {
        let shapes = [
            (1, 1, 1),
            (3, 5, 7),
            (4, 3, 8),
            (9, 11, 33),
            (5, 64, 192),
            (33, 70, 600),
        ];
        for (rows, outputs, width) in shapes {
            let x: Vec<f32> = (0..rows * width).map(value).collect();
            let (weights, panels) = packed(outputs, width);
            let mut out = vec![f32::NAN; rows * outputs];
            panels.products(&mut out, &x);
            for (at, found) in out.iter().enumerate() {
                let (r, o) = (at / outputs, at % outputs);
                let line = x[r * width..].iter().zip(&weights[o * width..]);
                let expected: f64 = line
                    .take(width)
                    .map(|(a, b)| f64::from(*a) * f64::from(*b))
                    .sum();
                let error = (f64::from(*found) - expected).abs();
                assert!(
                    error < 1e-5 * (width as f64).sqrt(),
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
            let (_, panels) = packed(outputs, width);
            let product = |rows: std::ops::Range<usize>| {
                let mut out = vec![0.0; rows.len() * outputs];
                let x = &x[rows.start * width..rows.end * width];
                panels.products(&mut out, x);
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

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn all_instructions_give_the_same_bits() {
        for (rows, outputs, width) in [(1, 40, 33), (2, 64, 300), (23, 70, 600)] {
            let x: Vec<f32> = (0..rows * width).map(value).collect();
            let (_, mut panels) = packed(outputs, width);
            let mut all = vec![Instructions::Plain];
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                all.push(Instructions::Avx2);
            }
            if is_x86_feature_detected!("avx512f") {
                all.push(Instructions::Avx512);
            }
            let mut found = Vec::new();
            for &instructions in &all {
                panels.instructions = instructions;
                let mut out = vec![f32::NAN; rows * outputs];
                panels.products(&mut out, &x);
                found.push(out);
            }
            for (out, instructions) in found.iter().zip(&all) {
                assert!(
                    *out == found[0],
                    "{instructions:?}: {rows}x{outputs}x{width}"
                );
            }
        }
    }
}

//! Causal attention of segments to the trunk, to their ancestors inside the block and to
//! themselves. Scores live only for 64 rows of one head at a time; the backward pass makes them
//! again from the saved log-sums.

use crate::{
    config::Config,
    forest::{block::Piece, path::KeyValue},
    kernel::{self, Mat, Threads, matmul},
};

const ROWS: usize = 64;

/// Queries, keys and values of the block's rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) query: &'a [f32],
    pub(super) key: &'a [f32],
    pub(super) value: &'a [f32],
}

/// What the backward pass knows of the forward pass, and the gradient that comes in.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen<'a> {
    pub(super) mixed: &'a [f32],
    pub(super) log_sums: &'a [f32],
    pub(super) dmixed: &'a [f32],
}

/// Where the backward pass adds.
#[derive(Debug)]
pub(super) struct Gradients<'a> {
    pub(super) query: &'a mut [f32],
    pub(super) key: &'a mut [f32],
    pub(super) value: &'a mut [f32],
    pub(super) above: &'a mut KeyValue,
}

/// Rows of a piece's ancestors inside the block followed by its own.
fn gather(out: &mut Vec<f32>, rows: &[f32], piece: &Piece, width: usize) {
    out.clear();
    for &(base, len) in piece.above.iter().chain([&(piece.base, piece.len)]) {
        out.extend_from_slice(&rows[base * width..(base + len) * width]);
    }
}

fn scatter(rows: &mut [f32], gathered: &[f32], piece: &Piece, width: usize) {
    let mut at = 0;
    for &(base, len) in piece.above.iter().chain([&(piece.base, piece.len)]) {
        let size = len * width;
        kernel::add(
            &mut rows[base * width..base * width + size],
            &gathered[at..at + size],
        );
        at += size;
    }
}

/// The geometry of up to [`ROWS`] rows of one head.
struct Tile {
    first: usize,
    rows: usize,
    head: usize,
    key_head: usize,
    above: usize,
    local: usize,
}

impl Tile {
    fn wide(&self) -> usize {
        self.above + self.local
    }
}

fn tiles(config: &Config, piece: &Piece, above: usize) -> impl Iterator<Item = Tile> {
    let (heads, group) = (
        config.num_attention_heads,
        config.num_attention_heads / config.num_key_value_heads,
    );
    let (len, above_tokens) = (piece.len, piece.above_tokens);
    (0..heads).flat_map(move |head| {
        (0..len).step_by(ROWS).map(move |first| {
            let rows = ROWS.min(len - first);
            Tile {
                first,
                rows,
                head,
                key_head: head / group,
                above,
                local: above_tokens + first + rows,
            }
        })
    })
}

/// Scores of a tile, scaled, unmasked.
fn scores(
    out: &mut Vec<f32>,
    tile: &Tile,
    config: &Config,
    query: Mat<'_>,
    above: &[f32],
    local: &[f32],
    t: Threads,
) {
    let (hd, k) = (config.head_dim, config.key_width());
    let scale = 1.0 / (hd as f32).sqrt();
    let at = tile.key_head * hd;
    out.resize(tile.rows * tile.wide(), 0.0);
    let wide = tile.wide();
    if tile.above > 0 {
        matmul(
            out,
            wide,
            0.0,
            scale,
            query,
            Mat::new(&above[at..], tile.above, hd, k).t(),
            t,
        );
    }
    matmul(
        &mut out[tile.above..],
        wide,
        0.0,
        scale,
        query,
        Mat::new(&local[at..], tile.local, hd, k).t(),
        t,
    );
}

/// How many of a tile's columns its row `i` may see.
fn visible(tile: &Tile, i: usize) -> usize {
    tile.wide() - tile.rows + i + 1
}

pub(super) fn forward(
    config: &Config,
    pieces: &[Piece],
    rows: Rows<'_>,
    above: &KeyValue,
    mixed: &mut [f32],
    log_sums: &mut [f32],
    threads: Threads,
) {
    let (hd, q, k, heads) = (
        config.head_dim,
        config.query_width(),
        config.key_width(),
        config.num_attention_heads,
    );
    let (mut keys, mut values, mut s) = (Vec::new(), Vec::new(), Vec::new());
    let above_tokens = above.keys.len() / k;
    for piece in pieces {
        gather(&mut keys, rows.key, piece, k);
        gather(&mut values, rows.value, piece, k);
        for tile in tiles(config, piece, above_tokens) {
            let row = piece.base + tile.first;
            let query = Mat::new(&rows.query[row * q + tile.head * hd..], tile.rows, hd, q);
            scores(&mut s, &tile, config, query, &above.keys, &keys, threads);
            let wide = tile.wide();
            for (i, line) in s.chunks_exact_mut(wide).enumerate() {
                let (seen, unseen) = line.split_at_mut(visible(&tile, i));
                unseen.fill(0.0);
                let largest = kernel::max(seen);
                let sum = kernel::exp_shifted(seen, largest);
                let inverse = 1.0 / sum;
                for value in seen {
                    *value *= inverse;
                }
                log_sums[(row + i) * heads + tile.head] = largest + sum.ln();
            }
            let at = tile.key_head * hd;
            let out = &mut mixed[row * q + tile.head * hd..];
            let mut beta = 0.0;
            if tile.above > 0 {
                let weights = Mat::new(&s, tile.rows, tile.above, wide);
                matmul(
                    out,
                    q,
                    0.0,
                    1.0,
                    weights,
                    Mat::new(&above.values[at..], tile.above, hd, k),
                    threads,
                );
                beta = 1.0;
            }
            let weights = Mat::new(&s[tile.above..], tile.rows, tile.local, wide);
            matmul(
                out,
                q,
                beta,
                1.0,
                weights,
                Mat::new(&values[at..], tile.local, hd, k),
                threads,
            );
        }
    }
}

pub(super) fn backward(
    config: &Config,
    pieces: &[Piece],
    rows: Rows<'_>,
    above: &KeyValue,
    seen: Seen<'_>,
    out: Gradients<'_>,
    threads: Threads,
) {
    let (hd, q, k, heads) = (
        config.head_dim,
        config.query_width(),
        config.key_width(),
        config.num_attention_heads,
    );
    let scale = 1.0 / (hd as f32).sqrt();
    let (mut keys, mut values, mut p, mut dp) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut dkeys, mut dvalues) = (Vec::new(), Vec::new());
    let above_tokens = above.keys.len() / k;
    for piece in pieces {
        gather(&mut keys, rows.key, piece, k);
        gather(&mut values, rows.value, piece, k);
        dkeys.clear();
        dkeys.resize(keys.len(), 0.0);
        dvalues.clear();
        dvalues.resize(keys.len(), 0.0);
        for tile in tiles(config, piece, above_tokens) {
            let row = piece.base + tile.first;
            let from = row * q + tile.head * hd;
            let query = Mat::new(&rows.query[from..], tile.rows, hd, q);
            let dmixed = Mat::new(&seen.dmixed[from..], tile.rows, hd, q);
            let (wide, at) = (tile.wide(), tile.key_head * hd);
            scores(&mut p, &tile, config, query, &above.keys, &keys, threads);
            for (i, line) in p.chunks_exact_mut(wide).enumerate() {
                let (visible, hidden) = line.split_at_mut(visible(&tile, i));
                hidden.fill(0.0);
                kernel::exp_shifted(visible, seen.log_sums[(row + i) * heads + tile.head]);
            }
            dp.resize(p.len(), 0.0);
            if tile.above > 0 {
                let v = Mat::new(&above.values[at..], tile.above, hd, k).t();
                matmul(&mut dp, wide, 0.0, 1.0, dmixed, v, threads);
            }
            let v = Mat::new(&values[at..], tile.local, hd, k).t();
            matmul(&mut dp[tile.above..], wide, 0.0, 1.0, dmixed, v, threads);
            // Values first: they need the probabilities, which then become score gradients.
            if tile.above > 0 {
                let weights = Mat::new(&p, tile.rows, tile.above, wide).t();
                matmul(
                    &mut out.above.values[at..],
                    k,
                    1.0,
                    1.0,
                    weights,
                    dmixed,
                    threads,
                );
            }
            let weights = Mat::new(&p[tile.above..], tile.rows, tile.local, wide).t();
            matmul(&mut dvalues[at..], k, 1.0, 1.0, weights, dmixed, threads);
            for (i, (line, dline)) in p
                .chunks_exact(wide)
                .zip(dp.chunks_exact_mut(wide))
                .enumerate()
            {
                let at = from + i * q;
                let delta = kernel::dot(&seen.dmixed[at..at + hd], &seen.mixed[at..at + hd]);
                for (ds, weight) in dline.iter_mut().zip(line) {
                    *ds = weight * (*ds - delta) * scale;
                }
            }
            let dquery = &mut out.query[from..];
            let mut beta = 0.0;
            if tile.above > 0 {
                let ds = Mat::new(&dp, tile.rows, tile.above, wide);
                matmul(
                    dquery,
                    q,
                    0.0,
                    1.0,
                    ds,
                    Mat::new(&above.keys[at..], tile.above, hd, k),
                    threads,
                );
                matmul(
                    &mut out.above.keys[at..],
                    k,
                    1.0,
                    1.0,
                    ds.t(),
                    query,
                    threads,
                );
                beta = 1.0;
            }
            let ds = Mat::new(&dp[tile.above..], tile.rows, tile.local, wide);
            matmul(
                dquery,
                q,
                beta,
                1.0,
                ds,
                Mat::new(&keys[at..], tile.local, hd, k),
                threads,
            );
            matmul(&mut dkeys[at..], k, 1.0, 1.0, ds.t(), query, threads);
        }
        scatter(out.key, &dkeys, piece, k);
        scatter(out.value, &dvalues, piece, k);
    }
}

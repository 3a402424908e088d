//! Weights in the form in which decoding multiplies with them, made once per version.

use std::{ops::Range, sync::Arc};

use rayon::prelude::*;

use crate::{
    device::{Device, DeviceError, Held, Operand, Product, Source},
    row_products::Panels,
    weights::Weights,
};

/// Rows of a product on a device. Always as many, so that the library chooses the same way of
/// computing it whatever the company; missing ones are zeros.
const DEVICE_ROWS: usize = 64;

/// Weights for decoding: packed for this processor (which takes their size again), or copied to a
/// device. Batches of the same weights share it.
pub struct Prepared {
    weights: Arc<Weights>,
    matrices: Matrices,
}

enum Matrices {
    Packed { layers: Vec<Layer>, head: Panels },
    Held(Arc<dyn Held>),
}

struct Layer {
    input: Panels,
    output: Panels,
    wide: Panels,
    down: Panels,
}

/// A matrix that rows are multiplied with; layers by index.
#[derive(Debug, Clone, Copy)]
pub(super) enum Matrix {
    /// Query, key and value, which lie one after the other.
    Input(usize),
    /// Back from attention.
    Output(usize),
    /// Gate and up, which lie one after the other.
    Wide(usize),
    /// Back from the feed-forward layer.
    Down(usize),
    /// Onto the vocabulary.
    Head,
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prepared")
            .field("parameters", &self.weights.len())
            .field("on_device", &matches!(self.matrices, Matrices::Held(_)))
            .finish()
    }
}

/// Where a matrix lies in the weights, and its inner width.
fn place(weights: &Weights, matrix: Matrix) -> (Range<usize>, usize) {
    let (config, layout) = (&weights.config, &weights.layout);
    let d = config.hidden_size;
    match matrix {
        Matrix::Input(layer) => {
            let places = &layout.layers[layer];
            (places.query.start..places.value.end, d)
        }
        Matrix::Output(layer) => (layout.layers[layer].output.clone(), config.query_width()),
        Matrix::Wide(layer) => {
            let places = &layout.layers[layer];
            (places.gate.start..places.up.end, d)
        }
        Matrix::Down(layer) => (layout.layers[layer].down.clone(), config.intermediate_size),
        Matrix::Head => (layout.head.clone(), d),
    }
}

impl Prepared {
    /// Packs the weights, or copies them to the device.
    ///
    /// # Errors
    /// [`DeviceError`] when the device does not take them.
    pub fn new(weights: Arc<Weights>, device: Device) -> Result<Self, DeviceError> {
        let matrices = match device.hold(&weights.data)? {
            Some(held) => Matrices::Held(held),
            None => {
                let pack = |matrix| {
                    let (range, width) = place(&weights, matrix);
                    Panels::pack(&weights.data[range], width)
                };
                let layers = 0..weights.config.num_hidden_layers;
                let layers = layers.into_par_iter().map(|index| Layer {
                    input: pack(Matrix::Input(index)),
                    output: pack(Matrix::Output(index)),
                    wide: pack(Matrix::Wide(index)),
                    down: pack(Matrix::Down(index)),
                });
                Matrices::Packed {
                    layers: layers.collect(),
                    head: pack(Matrix::Head),
                }
            }
        };
        Ok(Self { weights, matrices })
    }

    /// The weights themselves.
    #[must_use]
    pub fn weights(&self) -> &Arc<Weights> {
        &self.weights
    }

    /// Products of the rows in `x` with a matrix, row by row. A row's results do not depend on the
    /// others.
    pub(super) fn products(
        &self,
        matrix: Matrix,
        out: &mut [f32],
        x: &[f32],
    ) -> Result<(), DeviceError> {
        let held = match &self.matrices {
            Matrices::Packed { layers, head } => {
                let panels = match matrix {
                    Matrix::Input(layer) => &layers[layer].input,
                    Matrix::Output(layer) => &layers[layer].output,
                    Matrix::Wide(layer) => &layers[layer].wide,
                    Matrix::Down(layer) => &layers[layer].down,
                    Matrix::Head => head,
                };
                panels.products(out, x);
                return Ok(());
            }
            Matrices::Held(held) => held,
        };
        let (range, width) = place(&self.weights, matrix);
        let outputs = range.len() / width;
        let (mut rows, mut results) = (
            vec![0.0; DEVICE_ROWS * width],
            vec![0.0; DEVICE_ROWS * outputs],
        );
        for (x, out) in x
            .chunks(DEVICE_ROWS * width)
            .zip(out.chunks_mut(DEVICE_ROWS * outputs))
        {
            rows[..x.len()].copy_from_slice(x);
            rows[x.len()..].fill(0.0);
            let product = Product {
                beta: 0.0,
                alpha: 1.0,
                a: Operand {
                    source: Source::Memory(&rows),
                    rows: DEVICE_ROWS,
                    columns: width,
                    row_stride: width,
                    column_stride: 1,
                },
                b: Operand {
                    source: Source::Weights(range.start),
                    rows: width,
                    columns: outputs,
                    row_stride: 1,
                    column_stride: width,
                },
            };
            held.product(&mut results, &product)?;
            out.copy_from_slice(&results[..out.len()]);
        }
        Ok(())
    }
}

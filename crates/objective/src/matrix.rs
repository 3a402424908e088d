//! Rectangles of numbers, one row per sequence, with a mask beside them.

/// Why rows do not form a matrix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "objective: row {row} has {found} columns, row 0 has {expected}; pad the rows to one length"
)]
pub struct RaggedRows {
    /// The row.
    pub row: usize,
    /// Its columns.
    pub found: usize,
    /// Columns of the first row.
    pub expected: usize,
}

/// Numbers in rows of equal length. Rows are sequences, columns are token places.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    columns: usize,
    rows: usize,
    values: Vec<f64>,
}

impl Matrix {
    /// Takes rows of equal length.
    ///
    /// # Errors
    /// [`RaggedRows`] when they are not.
    pub fn from_rows(rows: &[Vec<f64>]) -> Result<Self, RaggedRows> {
        let columns = rows.first().map_or(0, Vec::len);
        if let Some((row, found)) = rows
            .iter()
            .map(Vec::len)
            .enumerate()
            .find(|(_, found)| *found != columns)
        {
            return Err(RaggedRows {
                row,
                found,
                expected: columns,
            });
        }
        Ok(Self {
            columns,
            rows: rows.len(),
            values: rows.concat(),
        })
    }

    /// Takes rows of any length; shorter ones are filled with zeros. Gives the matrix and its
    /// mask, 1 where there was a value.
    #[must_use]
    pub fn padded(rows: &[Vec<f64>]) -> (Self, Self) {
        let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
        let values = Self::build(rows.len(), columns, |row, column| {
            rows[row].get(column).copied().unwrap_or(0.0)
        });
        let mask = Self::build(rows.len(), columns, |row, column| {
            f64::from(u8::from(column < rows[row].len()))
        });
        (values, mask)
    }

    /// A matrix of one value.
    #[must_use]
    pub fn filled(rows: usize, columns: usize, value: f64) -> Self {
        Self {
            columns,
            rows,
            values: vec![value; rows * columns],
        }
    }

    /// Rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// All values, row by row.
    #[must_use]
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// One row.
    #[must_use]
    pub fn row(&self, row: usize) -> &[f64] {
        &self.values[row * self.columns..(row + 1) * self.columns]
    }

    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [f64] {
        &mut self.values[row * self.columns..(row + 1) * self.columns]
    }

    /// The matrix of `f(row, column)`.
    pub(crate) fn build(rows: usize, columns: usize, f: impl Fn(usize, usize) -> f64) -> Self {
        Self {
            columns,
            rows,
            values: (0..rows * columns)
                .map(|at| f(at / columns, at % columns))
                .collect(),
        }
    }

    pub(crate) fn map(&self, f: impl Fn(f64) -> f64) -> Self {
        Self {
            values: self.values.iter().map(|&value| f(value)).collect(),
            ..*self
        }
    }

    pub(crate) fn zip(&self, other: &Self, f: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            values: self
                .values
                .iter()
                .zip(&other.values)
                .map(|(&a, &b)| f(a, b))
                .collect(),
            ..*self
        }
    }

    /// Sums of the rows.
    pub(crate) fn row_sums(&self) -> Vec<f64> {
        (0..self.rows)
            .map(|row| self.row(row).iter().sum())
            .collect()
    }

    /// Sum over the masked places.
    #[must_use]
    pub fn masked_sum(&self, mask: &Self) -> f64 {
        masked_values(&self.values, &mask.values).sum()
    }

    /// Mean over the masked places; 0 when there are none.
    #[must_use]
    pub fn masked_mean(&self, mask: &Self) -> f64 {
        mean(masked_values(&self.values, &mask.values))
    }

    /// Unbiased variance over the masked places; 0 when there are fewer than two.
    #[must_use]
    pub fn masked_variance(&self, mask: &Self) -> f64 {
        let center = self.masked_mean(mask);
        let count = mask.masked_sum(mask);
        if count < 2.0 {
            return 0.0;
        }
        self.map(|value| (value - center).powi(2)).masked_sum(mask) / (count - 1.0)
    }

    /// Each value minus the masked mean, divided by the masked standard deviation. The mean is
    /// put back when `shift_mean` is false.
    #[must_use]
    pub fn masked_whiten(&self, mask: &Self, shift_mean: bool) -> Self {
        let center = self.masked_mean(mask);
        let scale = 1.0 / (self.masked_variance(mask) + 1e-8).sqrt();
        let back = if shift_mean { 0.0 } else { center };
        self.map(|value| (value - center) * scale + back)
    }

    /// Sum of each row over its masked places.
    pub(crate) fn masked_row_sums(&self, mask: &Self) -> Vec<f64> {
        (0..self.rows)
            .map(|row| masked_values(self.row(row), mask.row(row)).sum())
            .collect()
    }

    /// Mean of each row over its masked places; 0 for a row without any.
    pub(crate) fn masked_row_means(&self, mask: &Self) -> Vec<f64> {
        (0..self.rows)
            .map(|row| mean(masked_values(self.row(row), mask.row(row))))
            .collect()
    }

    /// Masked places of each row.
    #[must_use]
    pub fn counts(&self) -> Vec<usize> {
        (0..self.rows)
            .map(|row| self.row(row).iter().filter(|&&mask| mask != 0.0).count())
            .collect()
    }
}

fn masked_values<'a>(values: &'a [f64], mask: &'a [f64]) -> impl Iterator<Item = f64> + 'a {
    values
        .iter()
        .zip(mask)
        .filter(|(_, mask)| **mask != 0.0)
        .map(|(value, _)| *value)
}

pub(crate) fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (mut sum, mut count) = (0.0, 0.0);
    for value in values {
        sum += value;
        count += 1.0;
    }
    if count == 0.0 { 0.0 } else { sum / count }
}

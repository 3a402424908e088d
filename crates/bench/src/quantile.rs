//! Quantiles of measurements.

/// The quantile at `part` in [0, 1], linear between neighbours (type 7 of Hyndman and Fan 1996,
/// the default of numpy and R). `None` without values.
#[must_use]
pub fn quantile(values: &[f64], part: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    let place = part.clamp(0.0, 1.0) * last as f64;
    let low = place.floor();
    let (a, b) = (sorted[low as usize], sorted[place.ceil() as usize]);
    Some(a + (b - a) * (place - low))
}

#[cfg(test)]
mod tests {
    use super::quantile;

    #[test]
    fn values_of_numpy() {
        let values = [7.0, 15.0, 36.0, 39.0, 40.0, 41.0];
        for (part, expected) in [
            (0.0, 7.0),
            (0.25, 20.25),
            (0.5, 37.5),
            (0.95, 40.75),
            (1.0, 41.0),
        ] {
            assert_eq!(quantile(&values, part), Some(expected), "{part}");
        }
        assert_eq!(quantile(&[], 0.5), None);
        assert_eq!(quantile(&[3.0], 0.95), Some(3.0));
    }
}

//! How far two raters agree beyond chance.

/// Cohen's kappa over pairs of levels: (observed − expected) / (1 − expected), where expected is
/// what two raters with these habits would agree on by chance. `None` without pairs; 1 when both
/// always give the same single level (nothing is left to chance then).
#[must_use]
pub fn kappa(pairs: &[(f64, f64)]) -> Option<f64> {
    weighted(pairs, |a, b| f64::from(u8::from(a != b)))
}

/// Kappa with quadratic weights (Cohen 1968): a disagreement counts by the square of its size.
#[must_use]
pub fn kappa_quadratic(pairs: &[(f64, f64)]) -> Option<f64> {
    weighted(pairs, |a, b| (a - b).powi(2))
}

/// 1 − observed / expected disagreement.
fn weighted(pairs: &[(f64, f64)], distance: impl Fn(f64, f64) -> f64) -> Option<f64> {
    if pairs.is_empty() {
        return None;
    }
    let count = pairs.len() as f64;
    let observed: f64 = pairs.iter().map(|(a, b)| distance(*a, *b)).sum::<f64>() / count;
    let expected: f64 = pairs
        .iter()
        .flat_map(|(a, _)| pairs.iter().map(move |(_, b)| (*a, *b)))
        .map(|(a, b)| distance(a, b))
        .sum::<f64>()
        / (count * count);
    Some(if expected == 0.0 {
        1.0
    } else {
        1.0 - observed / expected
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(cells: &[(f64, f64, usize)]) -> Vec<(f64, f64)> {
        cells
            .iter()
            .flat_map(|(a, b, count)| std::iter::repeat_n((*a, *b), *count))
            .collect()
    }

    #[test]
    fn textbook_values() {
        // 50 applications, two readers: 20 yes/yes, 5 yes/no, 10 no/yes, 15 no/no: 0.40.
        let readers = table(&[
            (1.0, 1.0, 20),
            (1.0, 0.0, 5),
            (0.0, 1.0, 10),
            (0.0, 0.0, 15),
        ]);
        assert!((kappa(&readers).unwrap_or_default() - 0.4).abs() < 1e-12);
        // For two levels both weights are the same.
        assert!((kappa_quadratic(&readers).unwrap_or_default() - 0.4).abs() < 1e-12);
        assert_eq!(kappa(&[]), None);
        assert_eq!(kappa(&table(&[(0.5, 0.5, 4)])), Some(1.0));
        let opposite = table(&[(0.0, 1.0, 5), (1.0, 0.0, 5)]);
        assert_eq!(kappa(&opposite), Some(-1.0));
        // Near misses cost less than far ones.
        let near = table(&[(0.0, 0.25, 3), (1.0, 1.0, 3), (0.5, 0.5, 3)]);
        assert!(kappa_quadratic(&near) > kappa(&near));
    }
}

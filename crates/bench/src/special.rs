//! Quantiles of Student's t distribution.

/// Quantile of the normal distribution at 97.5 %.
pub(crate) const NORMAL_975: f64 = 1.959_963_984_540_054;

/// Logarithm of the gamma function for positive arguments (Lanczos' approximation, g = 7, nine
/// terms, about 15 digits).
fn log_gamma(x: f64) -> f64 {
    const TERMS: [f64; 9] = [
        0.999_999_999_999_809_9,
        676.520_368_121_885_1,
        -1_259.139_216_722_402_8,
        771.323_428_777_653_1,
        -176.615_029_162_140_6,
        12.507_343_278_686_905,
        -0.138_571_095_265_720_12,
        9.984_369_578_019_572e-6,
        1.505_632_735_149_311_6e-7,
    ];
    let x = x - 1.0;
    let base = x + 7.5;
    let sum: f64 = TERMS[0]
        + TERMS[1..]
            .iter()
            .enumerate()
            .map(|(at, term)| term / (x + at as f64 + 1.0))
            .sum::<f64>();
    0.5 * (2.0 * std::f64::consts::PI).ln() + (x + 0.5) * base.ln() - base + sum.ln()
}

/// The regularised incomplete beta function, by its continued fraction (modified Lentz).
fn incomplete_beta(a: f64, b: f64, x: f64) -> f64 {
    if x <= 0.0 || x >= 1.0 {
        return f64::from(u8::from(x >= 1.0));
    }
    if x > (a + 1.0) / (a + b + 2.0) {
        return 1.0 - incomplete_beta(b, a, 1.0 - x);
    }
    let front = log_gamma(a + b) - log_gamma(a) - log_gamma(b) + a * x.ln() + b * (1.0 - x).ln();
    let away_from_zero = |value: f64| if value.abs() < 1e-300 { 1e-300 } else { value };
    let mut c = 1.0;
    let mut d = 1.0 / away_from_zero(1.0 - (a + b) * x / (a + 1.0));
    let mut fraction = d;
    for step in 1..300 {
        let m = f64::from(step);
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        d = 1.0 / away_from_zero(1.0 + even * d);
        c = away_from_zero(1.0 + even / c);
        fraction *= c * d;
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        d = 1.0 / away_from_zero(1.0 + odd * d);
        c = away_from_zero(1.0 + odd / c);
        fraction *= c * d;
        if (c * d - 1.0).abs() < 1e-15 {
            break;
        }
    }
    front.exp() * fraction / a
}

/// The 97.5 % quantile of Student's t: half-width of a two-sided 95 % interval in standard
/// errors. Infinite for zero degrees of freedom.
#[must_use]
pub fn student_t_975(degrees: usize) -> f64 {
    if degrees == 0 {
        return f64::INFINITY;
    }
    let degrees = degrees as f64;
    let above = |t: f64| 0.5 * incomplete_beta(degrees / 2.0, 0.5, degrees / (degrees + t * t));
    let (mut low, mut high) = (NORMAL_975 - 1e-6, 13.0);
    for _ in 0..200 {
        let middle = f64::midpoint(low, high);
        if above(middle) > 0.025 {
            low = middle;
        } else {
            high = middle;
        }
    }
    f64::midpoint(low, high)
}

#[cfg(test)]
mod tests {
    use super::student_t_975;

    #[test]
    fn quantiles_are_those_of_the_tables() {
        for (degrees, expected) in [
            (1, 12.706_205),
            (2, 4.302_653),
            (5, 2.570_582),
            (10, 2.228_139),
            (30, 2.042_272),
            (63, 1.998_341),
            (1000, 1.962_339),
        ] {
            let found = student_t_975(degrees);
            assert!((found - expected).abs() < 2e-6, "{degrees}: {found}");
        }
        assert!(student_t_975(0).is_infinite());
    }
}

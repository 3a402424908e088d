//! The reward curve of a training run as an SVG file.
//!
//! SVG only: a bitmap would need a font file on the machine, and there may be none. Any browser
//! shows an SVG.

use std::path::{Path, PathBuf};

use plotters::prelude::*;

use crate::{error::CliError, score::Pass, summary::Summary};

/// The chart's name in a run directory.
const FILE: &str = "reward.svg";

const WIDTH: u32 = 900;
const HEIGHT: u32 = 480;
/// The strip of the legend.
const HEAD_HEIGHT: u32 = 40;
const LEGEND_LEFT: i32 = 74;
const LEGEND_STEP: i32 = 150;
const INK: RGBColor = RGBColor(0x33, 0x3a, 0x44);
const GRID: RGBColor = RGBColor(0xe3, 0xe6, 0xea);
const REWARD: RGBColor = RGBColor(0x1b, 0x7f, 0x5c);
const PASS: RGBColor = RGBColor(0x2f, 0x6f, 0xc4);
const HELD_OUT: RGBColor = RGBColor(0xc2, 0x5b, 0x12);

/// One training step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Point {
    /// The step, from 1.
    pub(crate) step: u64,
    /// Mean reward of its rollouts, 0 to 1.
    pub(crate) reward: f64,
    /// Share of its rollouts with full reward, 0 to 1.
    pub(crate) pass: f64,
}

/// An evaluation on held-out tasks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Mark {
    /// pass@1, 0 to 1.
    pub(crate) pass: f64,
    /// Its 95 % interval.
    pub(crate) ci95: (f64, f64),
}

/// Evaluations at the ends of the curve and between.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Marks {
    /// Before the first step.
    pub(crate) before: Option<Mark>,
    /// On the way, with the steps that were complete.
    pub(crate) during: Vec<(u64, Mark)>,
    /// After the last step.
    pub(crate) after: Option<Mark>,
}

/// Why a chart could not be written. The run itself is not affected.
#[derive(Debug, thiserror::Error)]
#[error("chart {path} could not be written: {reason}")]
pub(crate) struct ChartError {
    path: PathBuf,
    reason: String,
}

/// Draws the curve of a finished run into its directory, as `reward.svg`. `pass` is the pass rate
/// of each step, as `summary.reward` is its reward.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn reward_curve(folder: &Path, summary: &Summary, pass: &[f64]) -> Result<(), CliError> {
    let points: Vec<Point> = (1..)
        .zip(summary.reward.iter().zip(pass))
        .map(|(step, (&reward, &pass))| Point { step, reward, pass })
        .collect();
    let mark = |pass: &Pass| Mark {
        pass: pass.pass_at_1,
        ci95: (pass.ci95[0], pass.ci95[1]),
    };
    let eval = &summary.eval;
    let during = eval.during.iter();
    let marks = Marks {
        before: Some(mark(&eval.before.sampled)),
        during: during
            .map(|at| (at.step, mark(&at.evaluation.sampled)))
            .collect(),
        after: Some(mark(&eval.after.sampled)),
    };
    curve(&folder.join(FILE), &points, marks)
        .map_err(|error| CliError::failed("the reward curve", error))
}

/// Draws reward and pass rate by step, and the evaluations before and after with their intervals.
/// Values that are not finite are left out. The file appears whole or not at all.
///
/// # Errors
/// [`ChartError`] when the file cannot be written.
pub(crate) fn curve(path_svg: &Path, points: &[Point], marks: Marks) -> Result<(), ChartError> {
    let failed = |reason: String| ChartError {
        path: path_svg.to_owned(),
        reason,
    };
    let mut text = String::new();
    draw(&mut text, points, marks).map_err(|error| failed(error.to_string()))?;
    model::files::write_atomically(path_svg, text.as_bytes())
        .map_err(|error| failed(error.to_string()))
}

type DrawError<'a> = DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>;

type Value = fn(&Point) -> f64;

fn draw<'a>(text: &'a mut String, points: &[Point], marks: Marks) -> Result<(), DrawError<'a>> {
    let last = points.iter().map(|point| point.step).max().unwrap_or(1) as f64;
    let area = SVGBackend::with_string(text, (WIDTH, HEIGHT)).into_drawing_area();
    area.fill(&WHITE)?;
    // The legend stands above the curves, where it hides nothing.
    let (head, body) = area.split_vertically(HEAD_HEIGHT);
    let legend = [
        ("mean reward", REWARD),
        ("pass rate", PASS),
        ("held-out pass@1, 95 %", HELD_OUT),
    ];
    let font = ("sans-serif", 15).into_font();
    for (index, (name, colour)) in legend.into_iter().enumerate() {
        if colour == HELD_OUT && marks == Marks::default() {
            continue;
        }
        let x = LEGEND_LEFT + LEGEND_STEP * index as i32;
        head.draw(&Rectangle::new([(x, 20), (x + 20, 26)], colour.filled()))?;
        head.draw(&Text::new(name, (x + 28, 16), font.color(&INK)))?;
    }
    let mut chart = ChartBuilder::on(&body)
        .margin(16)
        .margin_top(4)
        .x_label_area_size(42)
        .y_label_area_size(58)
        // Room at both ends, so that the marks do not sit on the axis.
        .build_cartesian_2d(-0.03 * last..1.03 * last, 0.0..1.0_f64)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(INK)
        .label_style(("sans-serif", 14).into_font().color(&INK))
        .x_desc("training step")
        .y_desc("reward, share of rollouts")
        .x_label_formatter(&|step| format!("{step:.0}"))
        .y_label_formatter(&|share| format!("{:.0} %", 100.0 * share))
        .draw()?;
    // They coincide when rewards are 0 or 1 only: the wide one stays visible below the other.
    let values: [(ShapeStyle, Value); 2] = [
        (REWARD.mix(0.45).stroke_width(6), |point| point.reward),
        (PASS.stroke_width(2), |point| point.pass),
    ];
    for (style, value) in values {
        let line: Vec<(f64, f64)> = points
            .iter()
            .map(|point| (point.step as f64, value(point)))
            .filter(|(_, value)| value.is_finite())
            .collect();
        chart.draw_series(LineSeries::new(line.clone(), style))?;
        let dots = line
            .into_iter()
            .map(|at| Circle::new(at, 3, style.filled()));
        chart.draw_series(dots)?;
    }
    let during = marks.during.iter();
    let during = during.map(|(step, mark)| (*step as f64, Some(*mark)));
    let marks: Vec<(f64, Mark)> = std::iter::once((0.0, marks.before))
        .chain(during)
        .chain([(last, marks.after)])
        .filter_map(|(step, mark)| Some((step, mark?)))
        .filter(|(_, mark)| {
            mark.pass.is_finite() && mark.ci95.0.is_finite() && mark.ci95.1.is_finite()
        })
        .collect();
    if !marks.is_empty() {
        let cap = 0.008 * last;
        let bars = marks.iter().flat_map(|(step, mark)| {
            let (step, (low, high)) = (*step, mark.ci95);
            let ends = [low, high].map(|end| vec![(step - cap, end), (step + cap, end)]);
            let lines = ends.into_iter().chain([vec![(step, low), (step, high)]]);
            lines.map(|line| PathElement::new(line, HELD_OUT.stroke_width(2)))
        });
        chart.draw_series(bars)?;
        let dots = marks
            .iter()
            .map(|(step, mark)| Circle::new((*step, mark.pass), 5, HELD_OUT.filled()));
        chart.draw_series(dots)?;
    }
    area.present()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(points: &[Point], marks: Marks) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("reward.svg");
        curve(&path, points, marks).unwrap();
        std::fs::read_to_string(path).unwrap()
    }

    fn point(step: u64, reward: f64) -> Point {
        Point {
            step,
            reward,
            pass: reward / 2.0,
        }
    }

    #[test]
    fn every_series_and_axis_is_named() {
        let first = Mark {
            pass: 0.4,
            ci95: (0.3, 0.5),
        };
        let before = Some(first);
        let after = Some(Mark {
            pass: 0.8,
            ci95: (0.7, 0.9),
        });
        let svg = drawn(
            &[point(1, 0.4), point(2, 0.6), point(3, 0.8)],
            Marks {
                before,
                during: vec![(2, first)],
                after,
            },
        );
        assert!(
            svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"),
            "{svg}"
        );
        for word in [
            "training step",
            "mean reward",
            "pass rate",
            "held-out pass@1",
            "100 %",
        ] {
            assert!(svg.contains(word), "{word} is missing");
        }
        // Three marks of radius 5; curve points have radius 3.
        assert_eq!(svg.matches("r=\"5\"").count(), 3);
        assert_eq!(svg.matches("r=\"3\"").count(), 6);
    }

    #[test]
    fn nothing_and_numbers_that_are_none_are_drawn_as_nothing() {
        let empty = drawn(&[], Marks::default());
        assert!(empty.contains("training step") && !empty.contains("<circle"));
        let odd = drawn(&[point(1, f64::NAN), point(2, 0.5)], Marks::default());
        assert!(!odd.contains("NaN") && !odd.contains("held-out"));
        assert_eq!(odd.matches("<circle").count(), 2);
    }

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let error = curve(Path::new("/nonexistent/reward.svg"), &[], Marks::default()).unwrap_err();
        assert!(
            error.to_string().contains("/nonexistent/reward.svg"),
            "{error}"
        );
    }
}

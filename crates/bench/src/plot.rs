//! Drawings of a report, as SVG text. The same numbers give the same bytes.

use plotters::prelude::*;

const WIDTH: u32 = 860;
const INK: RGBColor = RGBColor(0x33, 0x3a, 0x44);
const GRID: RGBColor = RGBColor(0xe3, 0xe6, 0xea);
/// Told apart also without colour vision (Okabe and Ito).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0x00, 0x00, 0x00),
];

type DrawError<'a> = DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>;

/// A value with its interval.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Whisker {
    pub(crate) label: String,
    pub(crate) value: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
    /// Which colour.
    pub(crate) colour: usize,
}

/// A named line.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

fn colour(index: usize) -> RGBColor {
    COLOURS[index % COLOURS.len()]
}

/// Dots with intervals, one below the other, on an axis from `low` to `high`. `None` when there
/// is nothing finite to draw.
pub(crate) fn whiskers(rows: &[Whisker], low: f64, high: f64, unit: &str) -> Option<String> {
    let rows: Vec<&Whisker> = rows
        .iter()
        .filter(|row| row.value.is_finite() && row.low.is_finite() && row.high.is_finite())
        .collect();
    if rows.is_empty() {
        return None;
    }
    let mut text = String::new();
    draw_whiskers(&mut text, &rows, low, high, unit).ok()?;
    Some(text)
}

fn draw_whiskers<'a>(
    text: &'a mut String,
    rows: &[&Whisker],
    low: f64,
    high: f64,
    unit: &str,
) -> Result<(), DrawError<'a>> {
    let height = 70 + 26 * rows.len() as u32;
    let area = SVGBackend::with_string(text, (WIDTH, height)).into_drawing_area();
    area.fill(&WHITE)?;
    let widest = rows.iter().map(|row| row.label.chars().count()).max();
    let mut chart = ChartBuilder::on(&area)
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size((8 * widest.unwrap_or(0) as u32 + 12).min(WIDTH / 2))
        .build_cartesian_2d(low..high, -0.5..rows.len() as f64 - 0.5)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .y_labels(0)
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(INK)
        .label_style(("sans-serif", 13).into_font().color(&INK))
        .x_desc(unit)
        .x_label_formatter(&|value| format!("{:.0}", 100.0 * value))
        .draw()?;
    for (index, row) in rows.iter().enumerate() {
        // From the top down.
        let y = (rows.len() - 1 - index) as f64;
        let style = colour(row.colour);
        let cap = |x: f64| PathElement::new(vec![(x, y - 0.15), (x, y + 0.15)], style);
        let line = vec![(row.low, y), (row.high, y)];
        chart.draw_series([
            PathElement::new(line, style.stroke_width(2)),
            cap(row.low),
            cap(row.high),
        ])?;
        chart.draw_series([Circle::new((row.value, y), 4, style.filled())])?;
        let at = chart.backend_coord(&(low, y));
        let font =
            ("sans-serif", 13)
                .into_font()
                .color(&INK)
                .pos(plotters::style::text_anchor::Pos::new(
                    plotters::style::text_anchor::HPos::Right,
                    plotters::style::text_anchor::VPos::Center,
                ));
        area.draw(&Text::new(row.label.clone(), (at.0 - 8, at.1), font))?;
    }
    area.present()
}

/// Lines with dots over a range, the vertical axis from 0 to 1 in percent. `None` without points.
pub(crate) fn lines(series: &[Line], x: &str, y: &str) -> Option<String> {
    let points: Vec<f64> = series
        .iter()
        .flat_map(|line| line.points.iter().map(|(x, _)| *x))
        .collect();
    let low = points.iter().copied().reduce(f64::min)?;
    let high = points.iter().copied().reduce(f64::max)?;
    let mut text = String::new();
    draw_lines(&mut text, series, (low, high), x, y).ok()?;
    Some(text)
}

fn draw_lines<'a>(
    text: &'a mut String,
    series: &[Line],
    (low, high): (f64, f64),
    x: &str,
    y: &str,
) -> Result<(), DrawError<'a>> {
    let head = 12 + 20 * series.len().div_ceil(2) as u32;
    let area = SVGBackend::with_string(text, (WIDTH, 340 + head)).into_drawing_area();
    area.fill(&WHITE)?;
    let (legend, body) = area.split_vertically(head);
    for (index, line) in series.iter().enumerate() {
        let left = 60 + (index % 2) as i32 * (WIDTH as i32 - 80) / 2;
        let top = 10 + 20 * (index / 2) as i32;
        let dash = Rectangle::new([(left, top), (left + 18, top + 5)], colour(index).filled());
        legend.draw(&dash)?;
        let font = ("sans-serif", 13).into_font().color(&INK);
        legend.draw(&Text::new(line.name.clone(), (left + 26, top - 4), font))?;
    }
    let room = ((high - low) * 0.03).max(0.02);
    let mut chart = ChartBuilder::on(&body)
        .margin(12)
        .x_label_area_size(38)
        .y_label_area_size(52)
        .build_cartesian_2d(low - room..high + room, 0.0..1.0_f64)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(INK)
        .label_style(("sans-serif", 13).into_font().color(&INK))
        .x_desc(x)
        .y_desc(y)
        .y_label_formatter(&|share| format!("{:.0}", 100.0 * share))
        .draw()?;
    for (index, line) in series.iter().enumerate() {
        let points: Vec<(f64, f64)> = line
            .points
            .iter()
            .copied()
            .filter(|(_, value)| value.is_finite())
            .collect();
        let style = colour(index);
        chart.draw_series(LineSeries::new(points.clone(), style.stroke_width(2)))?;
        let dots = points
            .into_iter()
            .map(|at| Circle::new(at, 3, style.filled()));
        chart.draw_series(dots)?;
    }
    area.present()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_numbers_give_the_same_drawing() {
        let row = |label: &str, value: f64| Whisker {
            label: label.into(),
            value,
            low: value - 0.1,
            high: value + 0.1,
            colour: 0,
        };
        let rows = [row("one", 0.5), row("two", 0.7), row("none", f64::NAN)];
        let svg = whiskers(&rows, 0.0, 1.0, "percent").unwrap_or_default();
        assert_eq!(svg.matches("<circle").count(), 2);
        assert!(svg.contains("one") && svg.contains("percent") && !svg.contains("NaN"));
        assert_eq!(whiskers(&rows, 0.0, 1.0, "percent"), Some(svg));
        assert_eq!(whiskers(&[], 0.0, 1.0, ""), None);
        let line = Line {
            name: "pass@k".into(),
            points: vec![(1.0, 0.2), (2.0, 0.4)],
        };
        let svg = lines(&[line], "k", "share").unwrap_or_default();
        assert_eq!(svg.matches("<circle").count(), 2);
        assert_eq!(lines(&[], "k", "share"), None);
    }
}

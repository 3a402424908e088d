//! A tree as a drawing, for papers and issues.
//!
//! Time and context run from left to right: thin bars are context, thick ones what the policy
//! generated, as long as the logarithm of their tokens. A branch leaves where its tokens leave the
//! path; above its start stands why, behind its end why it is not trained and what that costs. A
//! conversation that shares nothing hangs by a dotted line on the call that it follows from.
//!
//! Classes differ by colour and by pattern, what is not trained is hollow and dashed: so it can be
//! printed without colour. Equal trees give equal bytes. Hovering over a bar tells its call, tokens and
//! versions.

mod layout;

use std::fmt::Write;

use layout::{BEND, Layout, ROW};
use tree::{CallClass, DropReason, ForkCause, Kept, Node, Origin, Tree};

const MARGIN: f64 = 24.0;
const HEAD: f64 = 58.0;
const FOOT: f64 = 46.0;
const WIDTH_MIN: f64 = 560.0;
/// Half the height of a bar.
const CONTEXT: f64 = 2.5;
const GENERATED: f64 = 8.0;
const INK: &str = "#222a35";
const FAINT: &str = "#69727f";
const LINE: &str = "#9aa3b0";
/// Trees with more nodes are drawn without texts that show on hovering.
const TITLES_MAX: usize = 1500;

/// What stands above the tree.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Caption {
    /// First line.
    pub title: String,
    /// Second line, joined by dots.
    pub facts: Vec<String>,
}

/// What is shown of a class: colour, and lines of its pattern.
fn colour(class: CallClass) -> &'static str {
    // Told apart by people who see colours differently, and by their brightness in print.
    match class {
        CallClass::Main => "#1f5fa8",
        CallClass::Subagent => "#d98200",
        CallClass::Compaction => "#9b4f96",
        CallClass::Side => "#2f8f6b",
    }
}

const CLASSES: [CallClass; 4] = [
    CallClass::Main,
    CallClass::Subagent,
    CallClass::Compaction,
    CallClass::Side,
];

/// How a node is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Look {
    Context,
    ContextDropped,
    Trained,
    Dropped,
    /// On a kept path, but without log-probabilities.
    Untold,
}

struct Drawing<'a> {
    tree: &'a Tree,
    layout: Layout,
    looks: Vec<Look>,
    classes: Vec<CallClass>,
    reasons: Vec<Option<DropReason>>,
    text: String,
}

/// Draws a tree and what is kept of it as an SVG document.
#[must_use]
pub fn draw(tree: &Tree, kept: &Kept, caption: &Caption) -> String {
    let count = tree.nodes.len();
    let mut reasons = vec![None; count];
    let mut lost = vec![0; count];
    for dropped in &kept.dropped {
        reasons[dropped.node] = Some(dropped.reason);
        lost[dropped.node] = dropped.tokens_trainable;
    }
    let mut trained = vec![false; count];
    for &node in &kept.trained {
        trained[node] = true;
    }
    let looks: Vec<Look> = (0..count)
        .map(
            |index| match (tree.nodes[index].generated(), reasons[index]) {
                (false, None) => Look::Context,
                (false, Some(_)) => Look::ContextDropped,
                (true, _) if trained[index] => Look::Trained,
                (true, Some(_)) => Look::Dropped,
                (true, None) => Look::Untold,
            },
        )
        .collect();
    let labels = |nodes: &[usize], first: bool| {
        let head = match first {
            true => String::new(),
            false => nodes
                .first()
                .map_or_else(String::new, |&node| cause(tree, node)),
        };
        let reason = nodes.iter().rev().find_map(|&node| reasons[node]);
        let lost: usize = nodes.iter().map(|&node| lost[node]).sum();
        let tail = match (reason, lost) {
            (None, _) => String::new(),
            (Some(reason), 0) => reason.name(),
            (Some(reason), lost) => format!("{}, −{lost}", reason.name()),
        };
        (head, tail)
    };
    let layout = Layout::new(tree, kept, labels);
    let classes = tree
        .nodes
        .iter()
        .map(|node| {
            let call = match &node.origin {
                Origin::Generated { call, .. } => *call,
                Origin::Context => node.first_call,
            };
            tree.place(call)
                .map_or(CallClass::Main, |place| place.class)
        })
        .collect();
    let drawing = Drawing {
        tree,
        layout,
        looks,
        classes,
        reasons,
        text: String::new(),
    };
    drawing.document(caption)
}

/// Why a lane begins, in words: why its first call left, or why a later one left it.
fn cause(tree: &Tree, node: usize) -> String {
    let call = tree.nodes[node].first_call;
    let name = |cause: ForkCause| cause.name().replace('_', " ");
    if let Some(fork) = tree.forks.iter().find(|fork| fork.call == call) {
        let (name, against) = (name(fork.cause), fork.against);
        return match fork.cause {
            ForkCause::Retry | ForkCause::Subagent => format!("{name} of {against}"),
            ForkCause::Compaction => format!("{name} after {against}"),
            _ => format!("{name} since {against}"),
        };
    }
    let parent = tree.nodes[node].parent;
    let left = tree
        .forks
        .iter()
        .find(|fork| fork.against == call && fork.node == parent);
    match left {
        Some(fork) if fork.cause == ForkCause::Retry => format!("retried as {}", fork.call),
        Some(fork) => format!("{} in {}", name(fork.cause), fork.call),
        None => String::new(),
    }
}

/// Text as it may stand in XML; control characters, which may not, become spaces.
fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => safe.push(' '),
            c => safe.push(c),
        }
    }
    safe
}

fn plural(count: usize, word: &str) -> String {
    let s = if count == 1 { "" } else { "s" };
    format!("{count} {word}{s}")
}

/// A length without more digits than are seen.
fn px(length: f64) -> String {
    let rounded = format!("{length:.1}");
    rounded
        .strip_suffix(".0")
        .map_or(rounded.clone(), str::to_owned)
}

impl Drawing<'_> {
    /// Adds a line. Writing to a string cannot fail.
    fn put(&mut self, line: std::fmt::Arguments<'_>) {
        let _ = self.text.write_fmt(line);
        self.text.push('\n');
    }

    fn words(&mut self, class: &str, x: f64, y: f64, words: &str) {
        self.put(format_args!(
            r#"<text class="{class}" x="{}" y="{}">{}</text>"#,
            px(x),
            px(y),
            escaped(words)
        ));
    }

    fn document(mut self, caption: &Caption) -> String {
        let width = (self.layout.width + 2.0 * MARGIN).max(WIDTH_MIN);
        let legend = self.legend_rows(width);
        let foot = HEAD + ROW * self.layout.rows as f64 + 14.0;
        let height = foot + FOOT + 20.0 * (legend.len().saturating_sub(1)) as f64;
        let [w, h] = [width, height].map(f64::ceil);
        self.put(format_args!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img" font-family="Helvetica, Arial, 'Liberation Sans', sans-serif">"#
        ));
        self.put(format_args!("<title>{}</title>", escaped(&caption.title)));
        self.style();
        self.put(format_args!(
            r##"<rect width="{w}" height="{h}" fill="#fff"/>"##
        ));
        // A title that is too long keeps its end, where names differ.
        let room = ((width - 2.0 * MARGIN) / 8.2) as usize;
        let characters = caption.title.chars().count();
        let title = match characters > room {
            true => {
                let end = caption.title.chars().skip(characters - room + 1);
                format!("…{}", end.collect::<String>())
            }
            false => caption.title.clone(),
        };
        self.words("t", MARGIN, 27.0, &title);
        self.words("f", MARGIN, 44.0, &caption.facts.join("  ·  "));
        if self.tree.nodes.is_empty() {
            self.words("f", MARGIN, HEAD + 20.0, "no calls");
        }
        self.lines();
        for node in 0..self.tree.nodes.len() {
            self.bar(node);
        }
        self.labels();
        self.legend(&legend, foot);
        self.text.push_str("</svg>\n");
        self.text
    }

    /// Colours and patterns, only those that occur.
    fn style(&mut self) {
        self.put(format_args!(
            "<style>text{{fill:{INK};font-size:10px}}.t{{font-size:14px;font-weight:bold}}.f{{font-size:11px;fill:{FAINT}}}\
             .h{{fill:{INK};font-style:italic}}.d{{fill:{FAINT}}}.n{{fill:#fff;font-weight:bold;font-size:9px;text-anchor:middle}}\
             .m{{font-weight:bold;font-size:9px;text-anchor:middle}}.l{{fill:none;stroke:{LINE};stroke-width:1.3}}\
             .o{{fill:none;stroke:{LINE};stroke-width:1.3;stroke-dasharray:1 3;stroke-linecap:round}}\
             .c{{fill:#c3cad4}}.e{{fill:#fff;stroke:{LINE};stroke-width:1;stroke-dasharray:3 2}}\
             .x{{stroke:{INK};stroke-width:1.4}}</style>"
        ));
        let mut patterns = String::new();
        for class in CLASSES.into_iter().filter(|class| self.occurs(*class)) {
            let colour = colour(class);
            let marks = match class {
                CallClass::Main => continue,
                CallClass::Subagent => {
                    r#"<path d="M-1 1l2-2M0 6l6-6M5 7l2-2" stroke="white" stroke-width="1.3"/>"#
                }
                CallClass::Compaction => r#"<path d="M3 0v6" stroke="white" stroke-width="1.2"/>"#,
                CallClass::Side => r##"<circle cx="3" cy="3" r="1.1" fill="#fff"/>"##,
            };
            patterns += &format!(
                r#"<pattern id="e-{}" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="{colour}"/>{marks}</pattern>"#,
                class.name()
            );
        }
        if !patterns.is_empty() {
            self.put(format_args!("<defs>{patterns}</defs>"));
        }
    }

    /// Whether something generated by a class is drawn.
    fn occurs(&self, class: CallClass) -> bool {
        let mut nodes = self.tree.nodes.iter().zip(&self.classes);
        nodes.any(|(node, of)| *of == class && node.generated())
    }

    fn y(&self, lane: usize) -> f64 {
        HEAD + ROW * self.layout.lanes[lane].row as f64 + 24.0
    }

    /// Lines from where lanes leave to where they begin.
    fn lines(&mut self) {
        for number in 0..self.layout.lanes.len() {
            let lane = &self.layout.lanes[number];
            let Some(from) = lane.from else { continue };
            let x = MARGIN + self.layout.end(self.tree, from.node);
            let (y, below) = (self.y(self.layout.nodes[from.node].0), self.y(number));
            let class = if from.shared { "l" } else { "o" };
            let bend = BEND - 3.0;
            self.put(format_args!(
                r#"<path class="{class}" d="M{} {}V{}q0 {bend} {bend} {bend}H{}"/>"#,
                px(x),
                px(y),
                px(below - bend),
                px(x + BEND),
            ));
        }
    }

    fn bar(&mut self, index: usize) {
        let node = &self.tree.nodes[index];
        let (lane, left) = self.layout.nodes[index];
        let width = self.layout.scale.bar(node.tokens.len());
        let (x, y) = (MARGIN + left, self.y(lane));
        let half = if node.generated() { GENERATED } else { CONTEXT };
        let style = self.bar_style(index);
        let title = match self.tree.nodes.len() > TITLES_MAX {
            true => String::new(),
            false => format!("<title>{}</title>", escaped(&self.tells(index))),
        };
        // A hair of white between bars.
        let shown = (width - 0.8).max(0.8);
        let radius = if width > 5.0 { r#" rx="1.5""# } else { "" };
        self.put(format_args!(
            r#"<rect {style} x="{}" y="{}" width="{}" height="{}"{radius}>{title}</rect>"#,
            px(x),
            px(y - half),
            px(shown),
            px(2.0 * half),
        ));
        if let Origin::Generated { call, offset, .. } = &node.origin
            && *offset == 0
        {
            let number = call.to_string();
            if width >= 6.0 * number.len() as f64 + 3.0 {
                let solid = self.looks[index] == Look::Trained;
                let (class, x, y) = (if solid { "n" } else { "m" }, x + shown / 2.0, y + 3.2);
                let halo = self.halo(index, solid);
                self.put(format_args!(
                    r#"<text class="{class}" x="{}" y="{}"{halo}>{number}</text>"#,
                    px(x),
                    px(y)
                ));
            }
        }
        let lost = |call: &u32| self.tree.place(*call).is_some_and(|place| !place.delivered);
        if !node.outputs_end.is_empty() && node.outputs_end.iter().all(lost) {
            let x = x + width + 5.0;
            self.put(format_args!(
                r#"<path class="x" d="M{} {}l6 6m0-6l-6 6"><title>not delivered</title></path>"#,
                px(x),
                px(y - 3.0)
            ));
        }
    }

    /// Numbers on patterns get an edge in the colour of the class.
    fn halo(&self, index: usize, solid: bool) -> String {
        let class = self.classes[index];
        let colour = colour(class);
        match (solid, class) {
            (false, _) => format!(r#" fill="{colour}" style="fill:{colour}""#),
            (true, CallClass::Main) => String::new(),
            (true, _) => format!(r#" style="paint-order:stroke;stroke:{colour};stroke-width:3px""#),
        }
    }

    fn bar_style(&self, index: usize) -> String {
        let class = self.classes[index];
        let colour = colour(class);
        match self.looks[index] {
            Look::Context => r#"class="c""#.to_owned(),
            Look::ContextDropped => r#"class="e""#.to_owned(),
            Look::Trained => format!(r#"fill="{}""#, fill(class)),
            Look::Dropped => format!(
                r##"fill="#fff" stroke="{colour}" stroke-width="1.3" stroke-dasharray="3 2""##
            ),
            Look::Untold => format!(r#"fill="{colour}" fill-opacity=".22" stroke="{colour}""#),
        }
    }

    /// What a bar says when it is hovered over.
    fn tells(&self, index: usize) -> String {
        let node: &Node = &self.tree.nodes[index];
        let tokens = plural(node.tokens.len(), "token");
        let what = match &node.origin {
            Origin::Context => {
                return format!("{tokens} of context, first in call {}", node.first_call);
            }
            Origin::Generated { call, policy, .. } => {
                let mut versions: Vec<u64> = policy.iter().map(|span| span.version).collect();
                versions.dedup();
                let versions: Vec<String> = versions.iter().map(u64::to_string).collect();
                format!(
                    "call {call} ({}): {tokens} generated by policy version {}",
                    self.classes[index].name(),
                    versions.join(", ")
                )
            }
        };
        match (self.looks[index], self.reasons[index]) {
            (Look::Trained, _) => format!("{what}, trained"),
            (_, Some(reason)) => format!("{what}, not trained: {}", reason.name()),
            _ => format!("{what}, not trained: no log-probabilities"),
        }
    }

    fn labels(&mut self) {
        for number in 0..self.layout.lanes.len() {
            let lane = &self.layout.lanes[number];
            let (head, tail, left, right) =
                (lane.head.clone(), lane.tail.clone(), lane.left, lane.right);
            let y = self.y(number);
            if !head.is_empty() {
                self.words("h", MARGIN + left, y - GENERATED - 4.0, &head);
            }
            if !tail.is_empty() {
                self.words(
                    "d",
                    MARGIN + right + 8.0 + self.mark(number),
                    y + 3.5,
                    &tail,
                );
            }
        }
    }

    /// Room for the mark of a reply that was not delivered.
    fn mark(&self, lane: usize) -> f64 {
        let last = self.layout.lanes[lane].nodes.last();
        let ends = last.map(|&node| &self.tree.nodes[node].outputs_end);
        let undelivered = ends.is_some_and(|ends| {
            !ends.is_empty()
                && ends
                    .iter()
                    .all(|call| self.tree.place(*call).is_some_and(|place| !place.delivered))
        });
        if undelivered { 8.0 } else { 0.0 }
    }

    /// Signs with their words, in as many rows as they need.
    fn legend_rows(&self, width: f64) -> Vec<Vec<(Sign, String)>> {
        let mut signs = vec![(Sign::Context, "context".to_owned())];
        for class in CLASSES.into_iter().filter(|class| self.occurs(*class)) {
            signs.push((Sign::Class(class), format!("generated, {}", class.name())));
        }
        let seen = |look: Look| self.looks.contains(&look);
        if seen(Look::Dropped) || seen(Look::ContextDropped) {
            signs.push((Sign::Dropped, "not trained (−tokens lost)".to_owned()));
        }
        if seen(Look::Untold) {
            signs.push((Sign::Untold, "no log-probabilities".to_owned()));
        }
        if self.tree.places.iter().any(|place| !place.delivered) {
            signs.push((Sign::Undelivered, "not delivered".to_owned()));
        }
        for tokens in [10, 100, 1_000, 10_000] {
            let name = match tokens {
                10 => "10".to_owned(),
                100 => "100".to_owned(),
                1_000 => "1k".to_owned(),
                _ => "10k tokens".to_owned(),
            };
            signs.push((Sign::Length(tokens), name));
        }
        let mut rows = vec![Vec::new()];
        let mut x = 0.0;
        for (sign, name) in signs {
            let room = self.sign_width(sign) + 6.0 + 5.4 * name.chars().count() as f64 + 18.0;
            if x + room > width - 2.0 * MARGIN && x > 0.0 {
                rows.push(Vec::new());
                x = 0.0;
            }
            x += room;
            if let Some(row) = rows.last_mut() {
                row.push((sign, name));
            }
        }
        rows
    }

    fn sign_width(&self, sign: Sign) -> f64 {
        match sign {
            Sign::Length(tokens) => self.layout.scale.bar(tokens),
            Sign::Undelivered => 6.0,
            _ => 22.0,
        }
    }

    fn legend(&mut self, rows: &[Vec<(Sign, String)>], top: f64) {
        self.put(format_args!(
            r#"<path d="M{MARGIN} {}h{}" stroke="{LINE}" stroke-width=".5"/>"#,
            px(top),
            px((self.layout.width + 2.0 * MARGIN).max(WIDTH_MIN) - 2.0 * MARGIN)
        ));
        for (number, row) in rows.iter().enumerate() {
            let (mut x, y) = (MARGIN, top + 24.0 + 20.0 * number as f64);
            for (sign, name) in row {
                let width = self.sign_width(*sign);
                let bar = |half: f64, style: &str| {
                    format!(
                        r#"<rect {style} x="{}" y="{}" width="{}" height="{}" rx="1.5"/>"#,
                        px(x),
                        px(y - half),
                        px(width),
                        px(2.0 * half)
                    )
                };
                let main = colour(CallClass::Main);
                let shape = match sign {
                    Sign::Context | Sign::Length(_) => bar(CONTEXT, r#"class="c""#),
                    Sign::Class(class) => bar(6.0, &format!(r#"fill="{}""#, fill(*class))),
                    Sign::Dropped => bar(
                        6.0,
                        &format!(
                            r##"fill="#fff" stroke="{main}" stroke-width="1.3" stroke-dasharray="3 2""##
                        ),
                    ),
                    Sign::Untold => bar(
                        6.0,
                        &format!(r#"fill="{main}" fill-opacity=".22" stroke="{main}""#),
                    ),
                    Sign::Undelivered => {
                        format!(
                            r#"<path class="x" d="M{} {}l6 6m0-6l-6 6"/>"#,
                            px(x),
                            px(y - 3.0)
                        )
                    }
                };
                self.put(format_args!("{shape}"));
                x += width + 6.0;
                self.words("d", x, y + 3.5, name);
                x += 5.4 * name.chars().count() as f64 + 18.0;
            }
        }
    }
}

/// What the legend explains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sign {
    Context,
    Class(CallClass),
    Dropped,
    Untold,
    Undelivered,
    Length(usize),
}

fn fill(class: CallClass) -> String {
    match class {
        CallClass::Main => colour(class).to_owned(),
        class => format!("url(#e-{})", class.name()),
    }
}

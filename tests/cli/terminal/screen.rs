//! The contents of a terminal's screen after some output. Knows only the control sequences that the
//! commands use.

pub(super) struct Screen {
    cells: Vec<Vec<char>>,
    row: usize,
    column: usize,
}

impl Screen {
    /// The screen of this size, in rows and columns, after this output.
    pub(super) fn after(output: &str, (rows, columns): (u16, u16)) -> Self {
        let mut screen = Self {
            cells: vec![vec![' '; columns.into()]; rows.into()],
            row: 0,
            column: 0,
        };
        let mut rest = output.chars();
        while let Some(c) = rest.next() {
            match c {
                '\x1b' => {
                    let sequence = rest.as_str();
                    let Some(parameters) = sequence.strip_prefix('[') else {
                        rest.next();
                        continue;
                    };
                    let end = parameters.find(|c: char| c.is_ascii_alphabetic());
                    let Some(end) = end else { break };
                    screen.control(&parameters[..end], &parameters[end..=end]);
                    rest = parameters[end + 1..].chars();
                }
                '\r' => screen.column = 0,
                '\n' => screen.new_line(),
                c => screen.print(c),
            }
        }
        screen
    }

    fn control(&mut self, parameters: &str, kind: &str) {
        let mut numbers = parameters.split(';').map(|n| n.parse().unwrap_or(1_usize));
        let first = numbers.next().unwrap_or(1);
        match kind {
            "H" => {
                self.row = first.saturating_sub(1);
                self.column = numbers.next().unwrap_or(1).saturating_sub(1);
            }
            "A" => self.row = self.row.saturating_sub(first),
            "K" => self.erase_from_cursor(self.row + 1),
            "J" if parameters.is_empty() => self.erase_from_cursor(self.cells.len()),
            "J" => self.cells.iter_mut().for_each(|row| row.fill(' ')),
            "h" | "l" if parameters == "?1049" => {
                self.cells.iter_mut().for_each(|row| row.fill(' '));
            }
            _ => {}
        }
    }

    /// Erases the rest of the row of the cursor, and the following rows before the row `end`.
    fn erase_from_cursor(&mut self, end: usize) {
        let columns = self.cells[0].len();
        self.cells[self.row][self.column.min(columns)..].fill(' ');
        self.cells[self.row + 1..end]
            .iter_mut()
            .for_each(|row| row.fill(' '));
    }

    fn new_line(&mut self) {
        if self.row + 1 < self.cells.len() {
            self.row += 1;
        } else {
            let columns = self.cells[0].len();
            self.cells.remove(0);
            self.cells.push(vec![' '; columns]);
        }
    }

    fn print(&mut self, c: char) {
        if self.column >= self.cells[0].len() {
            self.column = 0;
            self.new_line();
        }
        if let Some(row) = self.cells.get_mut(self.row) {
            row[self.column] = c;
        }
        self.column += 1;
    }

    /// The text of a row, counted from 0.
    pub(super) fn row(&self, row: u16) -> String {
        self.cells[usize::from(row)].iter().collect()
    }

    /// The whole text, one line per row.
    pub(super) fn text(&self) -> String {
        let rows = self.cells.iter().map(|row| row.iter().collect::<String>());
        rows.collect::<Vec<_>>().join("\n")
    }
}

//! Steps of a history that attach, detach and reattach partitions, and that move rows between partitions.

use super::History;
use crate::capture::table::Kind;

/// A partition with the rows of one year, which is 2030 or later.
#[derive(Debug)]
pub(super) struct Partition {
    year: usize,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Attached after the relay last compared the table, so the relay does not know the partition yet. The
    /// history detaches it only after the next comparison.
    New,
    Known,
    Detached,
}

impl Partition {
    fn name(&self) -> String {
        format!("public.more_{}", self.year)
    }

    fn attach(&self) -> String {
        format!(
            "ALTER TABLE public.parts ATTACH PARTITION {} \
             FOR VALUES FROM ('{}-01-01') TO ('{}-01-01')",
            self.name(),
            self.year,
            self.year + 1
        )
    }

    /// Returns SQL that inserts five rows of this partition's year into `table`. Their numbers begin with
    /// `first`.
    fn insert(&self, table: &str, key: &str, first: u32) -> String {
        format!(
            "INSERT INTO {table} (aggregatetype, aggregateid, event_type, payload, day) \
             SELECT 'order', '{key}', 'New', jsonb_build_object('n', i), '{}-05-05' \
             FROM generate_series({first}, {}) i",
            self.year,
            first + 4
        )
    }
}

impl History {
    /// Attaches a new partition that has five rows.
    pub(super) async fn attach(&mut self) {
        if self.world.kind != Kind::Partitioned {
            return;
        }
        self.end_all().await;
        let partition = Partition {
            year: 2030 + self.partitions.len(),
            state: State::New,
        };
        let name = partition.name();
        self.say(&format!("attach {name}"));
        let insert = partition.insert(&name, &format!("attached{}", self.step), self.world.next);
        self.world.next += 5;
        let create = format!("CREATE TABLE {name} (LIKE public.parts INCLUDING ALL)");
        let attach = partition.attach();
        self.partitions.push(partition);
        self.attached(&format!("{create}; {insert}; {attach}"))
            .await;
    }

    /// Attaches a detached partition again, sometimes with five more rows. The relay must publish these
    /// rows, because they belong to the table from then on.
    pub(super) async fn attach_again(&mut self) {
        let Some(nth) = self.one_that_is(State::Detached) else {
            return;
        };
        self.end_all().await;
        let partition = &mut self.partitions[nth];
        partition.state = State::New;
        let name = partition.name();
        let mut sql = partition.attach();
        if self.random.below(2) == 0 {
            let key = format!("again{}", self.step);
            let insert = self.partitions[nth].insert(&name, &key, self.world.next);
            self.world.next += 5;
            sql = format!("BEGIN; {insert}; {sql}; COMMIT");
        }
        self.say(&format!("attach {name} again"));
        self.attached(&sql).await;
    }

    /// Runs SQL that attaches a partition with rows, and then stops the relay. A running relay might audit
    /// only after five minutes, but the next relay audits soon after its start.
    async fn attached(&mut self, sql: &str) {
        self.world.execute(sql).await;
        if let Some(relay) = self.relay.take() {
            relay.stop().await;
        }
    }

    /// Inserts five rows into an attached partition by inserting them into the partitioned table.
    pub(super) async fn insert_into_a_partition(&mut self) {
        let attached = [State::New, State::Known][self.random.below(2) as usize];
        let Some(nth) = self.one_that_is(attached) else {
            return;
        };
        let key = format!("in{}", self.step);
        let insert = self.partitions[nth].insert("public.parts", &key, self.world.next);
        self.world.next += 5;
        self.say(&format!("insert into {}", self.partitions[nth].name()));
        self.world.execute(&insert).await;
    }

    /// Detaches a partition, which may have unpublished rows.
    pub(super) async fn detach(&mut self) {
        let Some(nth) = self.one_that_is(State::Known) else {
            return;
        };
        self.end_all().await;
        if self.random.below(2) == 0 {
            self.insert_into_a_partition().await;
        }
        let name = self.partitions[nth].name();
        self.say(&format!("detach {name}"));
        // Note the rows now, because afterwards a query of the table does not return the rows of the
        // partition.
        self.world.note().await;
        let detach = format!("ALTER TABLE public.parts DETACH PARTITION {name}");
        self.world.execute(&detach).await;
        self.partitions[nth].state = State::Detached;
    }

    /// Notes that the relay has compared the table, so it knows all partitions of the table.
    pub(super) fn partitions_are_known(&mut self) {
        let new = self
            .partitions
            .iter_mut()
            .filter(|one| one.state == State::New);
        new.for_each(|one| one.state = State::Known);
    }

    fn one_that_is(&mut self, state: State) -> Option<usize> {
        let all = self.partitions.iter().enumerate();
        let found: Vec<usize> = all
            .filter(|(_, one)| one.state == state)
            .map(|(nth, _)| nth)
            .collect();
        let count = u32::try_from(found.len()).unwrap();
        (count > 0).then(|| found[self.random.below(count) as usize])
    }

    /// Moves about a third of the rows with a `day` before June 2022 to a later partition, whether the
    /// rows are published or not. Does nothing if the table is not partitioned.
    pub(super) async fn move_rows(&mut self) {
        if self.world.kind != Kind::Partitioned {
            return;
        }
        self.end_all().await;
        self.settle_gaps().await;
        let rest = self.random.below(3);
        self.say(&format!("move the rows with the remainder {rest}"));
        let sql = format!(
            "UPDATE public.parts SET day = day + 366 \
             WHERE day < '2022-06-01' AND (payload->>'n')::int % 3 = {rest}"
        );
        self.world.execute(&sql).await;
    }
}

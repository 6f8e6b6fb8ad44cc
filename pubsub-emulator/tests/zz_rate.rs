mod raw;
use pubsub_emulator::*;
use raw::*;
use std::time::Instant;
#[test]
fn rate() {
    for (subs, recording) in [(false, Recording::Counts), (false, Recording::Attempts), (true, Recording::Counts)] {
        for batch in [1usize, 100, 1000] {
            let server = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            let emulator = server.block_on(async { Emulator::builder().recording(recording).start().await.unwrap() });
            let addr = emulator.addr();
            let server_thread = std::fs::read_dir("/proc/self/task").unwrap().map(|e| e.unwrap().path()).filter(|p| std::fs::read_to_string(p.join("comm")).is_ok_and(|c| c.contains("tokio"))).max_by_key(|p| p.file_name().unwrap().to_str().unwrap().parse::<u32>().unwrap()).expect("thread");
            let cpu = || { let s = std::fs::read_to_string(server_thread.join("stat")).unwrap(); let f: Vec<&str> = s.rsplit(')').next().unwrap().split_whitespace().collect(); (f[11].parse::<u64>().unwrap() + f[12].parse::<u64>().unwrap()) as f64 / 100.0 };
            let client = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            client.block_on(async {
                let mut clients = Clients::connect(addr, "rate").await;
                let topic = if subs { clients.create_ordered("orders").await.0 } else { clients.create_topic("orders").await };
                let msgs: Vec<_> = (0..batch).map(|n| { let mut m = event("key", &format!("{n:036}")); for a in ["event_type","aggregate_type","aggregate_id","version","schema_version","occurred_at"] { m.attributes.insert(a.into(), "some-value-here-24-bytes".into()); } m.data = vec![b'x'; 200].into(); m }).collect();
                let total = if batch == 1 { 50_000 } else { 400_000 };
                let start = Instant::now(); let c0 = cpu();
                let mut tasks = vec![];
                for _ in 0..16 {
                    let mut c = clients.clone(); let msgs = msgs.clone(); let topic = topic.clone();
                    tasks.push(tokio::spawn(async move { for _ in 0..total / 16 / batch { c.publish(&topic, msgs.clone()).await.unwrap(); } }));
                }
                for t in tasks { t.await.unwrap(); }
                let n = (total / 16 / batch * 16 * batch) as f64;
                println!("subs={subs} {recording:?} batch={batch}: {:.0} msg/s, server {:.2} us/msg", n / start.elapsed().as_secs_f64(), (cpu() - c0) * 1e6 / n);
            });
            server.block_on(emulator.shutdown());
        }
    }
}

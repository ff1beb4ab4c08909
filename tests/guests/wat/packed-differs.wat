;; Scores 0.5 if a batch is packed, and 0.25 if it is passed as records.
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/rewards@0.1.0;
;;! world export querl:plugin/packed-rewards@0.1.0;
(module
  ;;! include memory
  ;;! include describe
  ;;! include check-settings
  ;;! include range
  ;;! include packed
  (func $odd (param $results i32) (param $n_bytes i32) (result i32)
    (local.get $n_bytes))
  (func (export "querl:plugin/rewards@0.1.0#score-batch") (param $episodes i32) (param $n_episodes i32) (result i32)
    (local $results i32) (local $index i32) (local $result i32)
    (local.set $results (call $allocate
      (i32.const 0) (i32.const 0) (i32.const 8) (i32.mul (local.get $n_episodes) (i32.const 24))))
    (loop $next
      (if (i32.lt_u (local.get $index) (local.get $n_episodes))
        (then
          (local.set $result (i32.add (local.get $results) (i32.mul (local.get $index) (i32.const 24))))
          (i32.store (local.get $result) (i32.const 0))
          (f64.store offset=8 (local.get $result) (f64.const 0.25))
          (i64.store offset=16 (local.get $result) (i64.const 0))
          (local.set $index (i32.add (local.get $index) (i32.const 1)))
          (br $next))))
    (i32.store (i32.const 256) (local.get $results))
    (i32.store (i32.const 260) (local.get $n_episodes))
    (i32.const 256))
)

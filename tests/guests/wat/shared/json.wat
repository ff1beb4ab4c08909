  ;; Scores an episode 0.5 if the batch has less than 250 bytes, as with one episode. For a longer batch, `$odd` returns the
  ;; address of the result and sets its length.
  (global $n_odd_bytes (mut i32) (i32.const 0))
  (data (i32.const 1500) "[{\22scored\22:{\22total\22:0.5,\22components\22:[]}}]")
  (func (export "querl:plugin/json-rewards@0.1.0#score-json") (param $batch i32) (param $n_bytes i32) (result i32)
    (i32.store (i32.const 256) (i32.const 1500))
    (i32.store (i32.const 260) (i32.const 42))
    (if (i32.ge_u (local.get $n_bytes) (i32.const 250))
      (then
        (i32.store (i32.const 256) (call $odd))
        (i32.store (i32.const 260) (global.get $n_odd_bytes))))
    (i32.const 256))

  ;; Turns the result into a rejection with the code `odd` and this detail.
  (data (i32.const 1300) "odd")
  (func $reject (param $result i32) (param $detail i32) (param $n_bytes i32)
    (i32.store (local.get $result) (i32.const 1))
    (i32.store offset=8 (local.get $result) (i32.const 1300))
    (i32.store offset=12 (local.get $result) (i32.const 3))
    (i32.store offset=16 (local.get $result) (local.get $detail))
    (i32.store offset=20 (local.get $result) (local.get $n_bytes)))

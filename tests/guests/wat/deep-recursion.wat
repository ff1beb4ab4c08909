;; Calls itself without end.
(module
  ;;! include reward

  (func $odd (param $depth i32)
    (call $odd (i32.add (local.get $depth) (i32.const 1)))
    ;; Not the last thing it does: the frames stay.
    (i32.store (i32.const 512) (local.get $depth)))
)

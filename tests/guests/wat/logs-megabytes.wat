;; Logs lines of 8 MiB endlessly: little work in the guest, much in the host.
(module
  (import "querl:plugin/log@0.1.0" "log" (func $log (param i32 i32 i32)))
  ;;! include reward

  (func $odd (param i32)
    (drop (memory.grow (i32.const 128)))
    (memory.fill (i32.const 65536) (i32.const 120) (i32.const 0x800000))
    (loop $again
      (call $log (i32.const 0) (i32.const 65536) (i32.const 0x800000))
      (br $again)))
)

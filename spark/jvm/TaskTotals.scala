package penstock

import java.util.concurrent.atomic.AtomicLongArray

import org.apache.spark.Success
import org.apache.spark.scheduler.{SparkListener, SparkListenerTaskEnd}

/** What all tasks of this Spark did since its start. Spark keeps these figures by stage, and forgets old stages. */
class TaskTotals extends SparkListener {
  private val totals = new AtomicLongArray(TaskTotals.Figures)

  override def onTaskEnd(end: SparkListenerTaskEnd): Unit = {
    totals.incrementAndGet(if (end.reason == Success) 0 else 1)
    val metrics = end.taskMetrics // null when its executor is gone
    if (metrics != null) {
      totals.addAndGet(2, metrics.executorRunTime)
      totals.addAndGet(3, metrics.executorCpuTime / 1000000)
      totals.addAndGet(4, metrics.jvmGCTime)
      totals.addAndGet(5, metrics.memoryBytesSpilled)
      totals.addAndGet(6, metrics.diskBytesSpilled)
    }
  }

  /** Numbers, with blanks between them: tasks that succeeded, that did not; ms of running, of the processor, of collecting
    * garbage; bytes that were spilled, as they were in memory, as they were on disk. One text: a call costs Python more than
    * the numbers.
    */
  def toText: String = (0 until TaskTotals.Figures).map(totals.get).mkString(" ")
}

object TaskTotals {
  private val Figures = 7
}
